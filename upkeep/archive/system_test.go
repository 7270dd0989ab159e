//go:build system

package archive_test

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"stampede/internal/crashpoint"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/upkeep/archive"
)

// A process that dies at any step loses nothing: whatever is not in Postgres is in a whole file. The next one finishes
// it.
func TestArchivingIsFinishedAfterCrash(t *testing.T) {
	t.Parallel()
	for _, point := range []string{
		crashpoint.ArchiveWritten, crashpoint.ArchiveNamed, crashpoint.ArchiveMarked, crashpoint.ArchiveDeleting,
		crashpoint.ArchiveDeleted,
	} {
		t.Run(point, func(t *testing.T) {
			t.Parallel()
			s := testshop.NewShop(t, testkit.Pool(t))
			sale, receipt := endedSale(s, t, 1)
			before, dir := rows(s, t, sale), t.TempDir()
			path := filepath.Join(dir, sale.String()+".stampede")

			victim := s.Process(t)
			victim.Setenv(testwork.ArchiveEnv, sale.String())
			victim.Setenv(testwork.ArchiveDirEnv, dir)
			victim.Setenv(crashpoint.Env, point)
			victim.Start()
			victim.WaitKilled(30 * time.Second)
			if point != crashpoint.ArchiveWritten {
				requireFile(s, t, path, 61, 121)
			}
			if point == crashpoint.ArchiveWritten || point == crashpoint.ArchiveNamed {
				require.Equal(t, before, rows(s, t, sale), "nothing is deleted before Postgres names the file")
			} else {
				require.NoError(t, os.Rename(path, path+".away"))
				_, err := archiveSale(s, t, dir, sale)
				require.ErrorContains(t, err, "not deleted without the file")
				require.NoError(t, os.Rename(path+".away", path))
				require.Contains(t, testwork.TextOf(t, testwork.Audit(s, t, uuid.Nil)),
					"Redis still has this sale, with 0 buyers, and its orders are archived: repeat `stampede sale archive`")
			}

			done, err := archiveSale(s, t, dir, sale)
			require.NoError(t, err)
			requireFile(s, t, done.Path, 61, 121)
			requireArchived(s, t, sale, receipt)

			for range 2 {
				restorer := s.Process(t)
				restorer.Setenv(testwork.RestoreEnv, path)
				restorer.Setenv(crashpoint.Env, crashpoint.ArchiveRestoring)
				restorer.Start()
				restorer.WaitKilled(30 * time.Second)
				requireArchived(s, t, sale, receipt)
			}
			_, err = archive.Restore(t.Context(), s.Pool, path)
			require.NoError(t, err)
			require.Equal(t, before, rows(s, t, sale))
			requireSound(s, t)
		})
	}
}
