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
	"stampede/internal/test/testshop"
	"stampede/internal/test/testwork"
	"stampede/upkeep/archive"
)

// A process that dies at any step loses nothing: whatever is not in Postgres is in a whole file. The next one finishes
// it.
func TestArchivingIsFinishedAfterCrash(t *testing.T) {
	t.Parallel()
	for _, point := range []string{
		crashpoint.ArchiveWritten, crashpoint.ArchiveNamed, crashpoint.ArchiveMarked, crashpoint.ArchiveRemembered,
		crashpoint.ArchiveDeleting, crashpoint.ArchiveDeleted,
	} {
		t.Run(point, func(t *testing.T) {
			t.Parallel()
			s := testshop.NewShop(t)
			sale, receipt := endedSale(t, s, 1)
			before, dir := rows(t, s, sale), t.TempDir()
			path := filepath.Join(dir, sale.String()+".stampede")

			victim := s.Process(t, "archive", sale.String(), dir)
			victim.Setenv(crashpoint.Env, point)
			victim.Start()
			victim.WaitKilled(30 * time.Second)
			if point != crashpoint.ArchiveWritten {
				requireFile(t, s, path, 62, 124)
			}
			if point == crashpoint.ArchiveWritten || point == crashpoint.ArchiveNamed {
				require.Equal(t, before, rows(t, s, sale), "nothing is deleted before Postgres names the file")
			} else {
				require.NoError(t, os.Rename(path, path+".away"))
				_, err := archiveSale(t, s, dir, sale)
				require.ErrorContains(t, err, "it needs the file that Postgres names")
				require.NoError(t, os.Rename(path+".away", path))
				require.Contains(t, testwork.Text(t, testwork.Audit(t, s, uuid.Nil)),
					"Redis still has this sale, with 0 buyers, and its orders are archived: repeat `stampede sale archive`")
			}

			done, err := archiveSale(t, s, dir, sale)
			require.NoError(t, err)
			requireFile(t, s, done.Path, 62, 124)
			requireArchived(t, s, sale, receipt)

			for range 2 {
				restorer := s.Process(t, "restore", path)
				restorer.Setenv(crashpoint.Env, crashpoint.ArchiveRestoring)
				restorer.Start()
				restorer.WaitKilled(30 * time.Second)
				requireArchived(t, s, sale, receipt)
			}
			_, err = archive.Restore(t.Context(), s.Pool, path)
			require.NoError(t, err)
			require.Equal(t, before, rows(t, s, sale))
			requireSound(t, s)
		})
	}
}
