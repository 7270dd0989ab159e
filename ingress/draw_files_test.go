package ingress

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"stampede/draw"
	"stampede/internal/test/testkit"
	"stampede/internal/test/testshop"
)

// fillList gives the draw a frozen list of so many chunks, and returns its length.
func (d drawn) fillList(chunks int) int64 {
	d.t.Helper()
	testshop.Exec(d.t, d.pool, `INSERT INTO draw_chunks (sale_id, chunk, first_id, records, ids, hash)
		SELECT $1, n, gen_random_uuid(), decode(repeat('00', 33 * 1024), 'hex'), decode(repeat('00', 16 * 1024), 'hex'),
			decode(repeat('00', 32), 'hex') FROM generate_series(0, $2::int - 1) AS n`, d.goods, chunks)
	testshop.Exec(d.t, d.pool, `UPDATE draws SET entries = 1024 * $2::bigint, root = decode(repeat('00', 32), 'hex'),
		frozen_at = now() WHERE sale_id = $1`, d.goods, chunks)
	testshop.Exec(d.t, d.pool, `WITH sale AS (UPDATE sales SET revision = revision + 1 WHERE id = $1 RETURNING id, revision)
		INSERT INTO sale_events (sale_id, revision, type) SELECT id, revision, 'DrawFrozen' FROM sale`, d.goods)
	testkit.Eventually(d.t, 10*time.Second, "the list is known", func() bool {
		return d.get(d.path).is(http.StatusOK)["root"] != nil
	})
	return int64(chunks) * 1024 * draw.RecordBytes
}

// download sends a request for the list, of which it reads the head.
func (d drawn) download(from string) *http.Response {
	d.t.Helper()
	slow := d.dial()
	slow.sends("GET " + d.path + "/leaves HTTP/1.1\r\nHost: shop\r\nX-Forwarded-For: " + from + "\r\n\r\n")
	res, err := http.ReadResponse(slow.answers, nil)
	require.NoError(d.t, err)
	return res
}

// A client that does not read keeps no connection of Postgres, no other client out, and takes no more than its places.
func TestSlowDownloadsHoldNothing(t *testing.T) {
	t.Parallel()
	s := openShop(t, behindProxy, func(c *Config) { c.AddressStreams = 1 })
	d := s.prepareDraw()
	d.create("").is(http.StatusCreated)
	size := d.fillList(1000)
	res := d.download("192.0.2.1")
	require.Equal(t, size, res.ContentLength)
	for i := range directMax {
		other := d.download(fmt.Sprint("192.0.2.", i+2))
		require.Equal(t, http.StatusOK, other.StatusCode)
	}
	testkit.Eventually(t, 10*time.Second, "no connection is taken", func() bool {
		return s.pool.Stat().AcquiredConns() == 0
	})
	require.Len(t, d.get(d.path+"/leaves").body, int(size), "a further one gets it whole")
	own := fromAddress("192.0.2.1")
	p := d.get(d.path+"/bundle", own).isProblem(http.StatusTooManyRequests, "rate-limited")
	require.Contains(t, p["detail"], "downloads")
	n, err := io.Copy(io.Discard, res.Body)
	require.NoError(t, err)
	require.Equal(t, size, n)
	testkit.Eventually(t, 10*time.Second, "its place is free", func() bool {
		return d.get(d.path+"/bundle", own).status == http.StatusOK
	})
	downloads := &s.server.limits.downloads.all
	for downloads.acquire() {
	}
	d.get(d.path+"/leaves").isProblem(http.StatusServiceUnavailable, "overloaded")
}

// A list is read from Postgres once, and then as often as somebody likes, in few parts.
func TestListIsReadOnce(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	d := s.prepareDraw()
	d.create("").is(http.StatusCreated)
	size := d.fillList(100)
	whole := d.get(d.path + "/leaves")
	require.Len(t, whole.body, int(size))
	testshop.Exec(t, s.pool, "DELETE FROM draw_chunks WHERE sale_id = $1", d.goods)
	for ranges, status := range map[string]int{
		"0-0": http.StatusPartialContent, "1-2,8-9,77000-77001,990000-990000": http.StatusPartialContent,
		"1-2,8-9,77000-77001,990000-990000,4-4": http.StatusOK, "-1": http.StatusPartialContent,
		strings.Repeat("5-5,", 2000) + "5-5": http.StatusOK,
		fmt.Sprintf("%d-", size):             http.StatusRequestedRangeNotSatisfiable,
	} {
		part := d.get(d.path+"/leaves", reqHeader{"Range", "bytes=" + ranges})
		require.Equal(t, status, part.status, ranges)
		if status == http.StatusOK {
			require.Equal(t, whole.body, part.body)
		}
	}
}

// A list that lacks a part does not look like one, and is read again by who asks again.
func TestListThatLacksPartBreaksOff(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	d := s.prepareDraw()
	d.create("").is(http.StatusCreated)
	size := d.fillList(200)
	testshop.Exec(t, s.pool, "CREATE TABLE kept AS SELECT * FROM draw_chunks WHERE chunk >= 150")
	testshop.Exec(t, s.pool, "DELETE FROM draw_chunks WHERE chunk >= 150")
	res := d.download("192.0.2.1")
	_, err := io.Copy(io.Discard, res.Body)
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)
	testshop.Exec(t, s.pool, "INSERT INTO draw_chunks SELECT * FROM kept")
	require.Len(t, d.get(d.path+"/leaves").body, int(size))

	// Without a disk it is read from Postgres, by few at a time.
	s.server.draws.files.drop(s.server.draws.files.byName[fmt.Sprintf("leaves of %s %x", d.goods, make([]byte, 32))])
	s.server.draws.files.fail(os.ErrPermission)
	require.Len(t, d.get(d.path+"/leaves").body, int(size))
	require.Equal(t, http.StatusOK, d.get(d.path+"/bundle").status)
	for s.server.draws.direct.acquire() {
	}
	d.get(d.path+"/leaves").isProblem(http.StatusServiceUnavailable, "overloaded")
}

func TestDownloadOfSlowClientIsCutOff(t *testing.T) {
	t.Parallel()
	part, results := make([]byte, 1<<20), make(chan error, 2)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		anHourAgo := time.Now().Add(-time.Hour)
		for _, read := range []int64{3600 * downloadRate, 0} {
			_, err := (&fileWriter{w, anHourAgo, read}).Write(part)
			results <- err
		}
	}))
	defer server.Close()
	res, err := http.Get(server.URL) //nolint:noctx // of this test
	require.NoError(t, err)
	require.NoError(t, <-results)
	require.ErrorIs(t, <-results, os.ErrDeadlineExceeded)
	_ = res.Body.Close()
}
