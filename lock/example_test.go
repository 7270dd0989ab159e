package lock_test

import (
	"context"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/printer"
	"go/token"
	"log"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"stampede/internal/dev/localserver"
	"stampede/lock"
)

// The lease is renewed until its release, however long the work takes.
func ExampleLocker_Acquire() {
	ctx := context.Background()
	locker, _, stop := exampleLocker(ctx)
	defer stop()

	lease, err := locker.Acquire(ctx, "{example}:invoice")
	if err != nil {
		log.Fatal(err)
	}
	defer func() {
		if err := lease.Release(ctx); err != nil {
			log.Print(err) // the lock was lost, or Redis is unavailable and the lock ends by itself
		}
	}()
	fmt.Println(lease.Keys(), lease.Err())
	// Output: [{example}:invoice] <nil>
}

// A context with a deadline bounds the wait.
func ExampleLocker_Acquire_waitingForSomeTime() {
	ctx := context.Background()
	locker, _, stop := exampleLocker(ctx)
	defer stop()

	lease, err := locker.Acquire(ctx, "{example}:invoice", lock.For(time.Minute))
	if err != nil {
		log.Fatal(err)
	}
	patient, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
	defer cancel()
	_, err = locker.Acquire(patient, "{example}:invoice")
	fmt.Println(errors.Is(err, lock.ErrBusy), errors.Is(err, context.DeadlineExceeded))
	fmt.Println(lease.Release(ctx))
	// Output:
	// true true
	// <nil>
}

// Look shows operators who holds a lock and for how long.
func ExampleLocker_Look() {
	ctx := context.Background()
	locker, _, stop := exampleLocker(ctx)
	defer stop()

	lease, err := locker.TryAcquire(ctx, "{example}:invoice", lock.For(time.Minute))
	if err != nil {
		log.Fatal(err)
	}
	now, err := locker.Look(ctx, "{example}:invoice")
	fmt.Println(now.Held(), now.Mine, now.Depth, now.Left > 50*time.Second, err)
	fmt.Println(lease.Release(ctx))
	now, err = locker.Look(ctx, "{example}:invoice")
	fmt.Println(now.Held(), err)
	// Output:
	// true true 1 true <nil>
	// <nil>
	// false <nil>
}

func ExampleLocker_TryAcquire() {
	ctx := context.Background()
	locker, _, stop := exampleLocker(ctx)
	defer stop()

	first, err := locker.TryAcquire(ctx, "{example}:invoice")
	if err != nil {
		log.Fatal(err)
	}
	_, err = locker.TryAcquire(ctx, "{example}:invoice")
	fmt.Println(errors.Is(err, lock.ErrBusy), err)
	fmt.Println(first.Release(ctx))
	// Output:
	// true lock busy: {example}:invoice
	// <nil>
}

// A function called by Do reenters the lock through its context.
func ExampleLocker_Do() {
	ctx := context.Background()
	locker, _, stop := exampleLocker(ctx)
	defer stop()

	write := func(ctx context.Context) error {
		return locker.Do(ctx, "{example}:invoice", func(context.Context) error {
			fmt.Println("writing")
			return nil
		})
	}
	err := locker.Do(ctx, "{example}:invoice", func(ctx context.Context) error {
		fmt.Println("alone")
		return write(ctx)
	})
	fmt.Println(err)
	// Output:
	// alone
	// writing
	// <nil>
}

func ExampleLocker_AcquireAll() {
	ctx := context.Background()
	locker, _, stop := exampleLocker(ctx)
	defer stop()

	transfer, err := locker.AcquireAll(ctx, []string{"{example}:account:1", "{example}:account:2"})
	if err != nil {
		log.Fatal(err)
	}
	_, err = locker.TryAcquire(ctx, "{example}:account:2")
	fmt.Println(err)
	fmt.Println(transfer.Release(ctx))
	// Output:
	// lock busy: {example}:account:2
	// <nil>
}

// A worker locks those users of a batch that no other worker has locked.
func ExampleLocker_TryEach() {
	ctx := context.Background()
	locker, rdb, stop := exampleLocker(ctx)
	defer stop()
	ann, bob, cid := "{example}:ann", "{example}:bob", "{example}:cid"

	first, _, err := locker.TryEach(ctx, []string{ann, bob}, lock.For(10*time.Second))
	if err != nil {
		log.Fatal(err)
	}
	second, busy, err := locker.TryEach(ctx, []string{bob, cid}, lock.For(10*time.Second))
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("first: ", first.Keys())
	fmt.Println("second:", second.Keys(), "busy:", busy)

	// Redis loses a lock. The release reports it.
	rdb.Del(ctx, cid)
	for _, lease := range []*lock.Lease{second, first} {
		fmt.Println(lease.Release(ctx))
	}
	// Output:
	// first:  [{example}:ann {example}:bob]
	// second: [{example}:cid] busy: [{example}:bob]
	// lock lost: {example}:cid
	// <nil>
}

// The context of a lease ends when the lock is lost, here because the lease was too short.
func ExampleLease_Context() {
	ctx := context.Background()
	locker, _, stop := exampleLocker(ctx)
	defer stop()

	lease, err := locker.Acquire(ctx, "{example}:invoice", lock.For(time.Second))
	if err != nil {
		log.Fatal(err)
	}
	working := lease.Context(ctx)
	<-working.Done() // longer than the lease
	fmt.Println(context.Cause(working))
	fmt.Println(lease.Err())
	fmt.Println(errors.Is(lease.Release(ctx), lock.ErrLost))
	// Output:
	// lock lost: {example}:invoice
	// lock lost: {example}:invoice
	// true
}

// A lock on three servers works while one of them is away.
func ExampleMulti() {
	ctx := context.Background()
	var nodes []*lock.Locker
	for range 3 {
		locker, _, stop := startExampleLocker(ctx)
		defer stop()
		nodes = append(nodes, locker)
	}
	multi, err := lock.NewMulti(nodes)
	if err != nil {
		log.Fatal(err)
	}
	err = multi.Do(ctx, "invoice", func(ctx context.Context) error {
		fmt.Println("alone")
		return nil
	})
	fmt.Println(err)
	// Output:
	// alone
	// <nil>
}

// exampleLocker returns a Locker in the Redis of the tests, or in one of its own.
func exampleLocker(ctx context.Context) (*lock.Locker, *redis.Client, func()) {
	if url := os.Getenv("REDIS_URL"); url != "" {
		return openExampleLocker(ctx, url, func() {})
	}
	return startExampleLocker(ctx)
}

func startExampleLocker(ctx context.Context) (*lock.Locker, *redis.Client, func()) {
	server, err := localserver.StartRedis(ctx, localserver.RedisOptions{})
	if err != nil {
		log.Fatal(err)
	}
	return openExampleLocker(ctx, server.URL, server.Stop)
}

func openExampleLocker(ctx context.Context, url string, stop func()) (*lock.Locker, *redis.Client, func()) {
	options, err := redis.ParseURL(url)
	if err != nil {
		log.Fatal(err)
	}
	rdb := redis.NewClient(options)
	locker := lock.New(rdb)
	return locker, rdb, func() {
		if err := locker.Close(ctx); err != nil {
			log.Fatal(err)
		}
		_ = rdb.Close()
		stop()
	}
}

// deposit refuses a stale token: the row keeps the largest token that it has seen.
const deposit = `
	UPDATE pg_temp.accounts SET balance = balance + $2, fence = $3
	WHERE id = $1 AND fence <= $3`

// The store refuses a holder that was stopped for longer than its lease and did not check it before
// the write.
func ExampleLease_Token() {
	ctx := context.Background()
	locker, _, stopRedis := exampleLocker(ctx)
	defer stopRedis()
	bank, stopPostgres := examplePostgres(ctx)
	defer stopPostgres()
	_, err := bank.Exec(ctx, `
		CREATE TEMP TABLE accounts (id bigint PRIMARY KEY, balance bigint NOT NULL, fence bigint NOT NULL DEFAULT 0);
		INSERT INTO accounts (id, balance) VALUES (1, 100)`)
	if err != nil {
		log.Fatal(err)
	}
	write := func(who string, lease *lock.Lease) {
		done, err := bank.Exec(ctx, deposit, 1, 10, lease.Token("{example}:account:1"))
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(who, "wrote", done.RowsAffected(), "row")
	}

	stopped, err := locker.Acquire(ctx, "{example}:account:1", lock.For(time.Second))
	if err != nil {
		log.Fatal(err)
	}
	successor, err := locker.Acquire(ctx, "{example}:account:1") // waits until that lease has ended
	if err != nil {
		log.Fatal(err)
	}
	write("the successor", successor)
	write("the stopped holder", stopped)
	fmt.Println(stopped.Release(ctx))
	fmt.Println(successor.Release(ctx))
	// Output:
	// the successor wrote 1 row
	// the stopped holder wrote 0 row
	// lock lost: {example}:account:1
	// <nil>
}

// examplePostgres connects to the Postgres of the tests, or starts one.
func examplePostgres(ctx context.Context) (*pgx.Conn, func()) {
	url, stop := os.Getenv("DATABASE_URL"), func() {}
	if url == "" {
		server, err := localserver.StartPostgres(ctx, localserver.PostgresOptions{})
		if err != nil {
			log.Fatal(err)
		}
		url, stop = server.URL, server.Stop
	}
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		log.Fatal(err)
	}
	return conn, func() { _ = conn.Close(ctx); stop() }
}

// The page of the lock lists each exported function as it is declared, and its other code is part
// of an example.
func TestDocumentationListsSignaturesAndExamples(t *testing.T) {
	page, err := os.ReadFile("../docs/lock.md")
	require.NoError(t, err)
	var listed []string
	examples := exampleLines(t)
	for _, block := range regexp.MustCompile("(?s)```go\n(.*?)```").FindAllStringSubmatch(string(page), -1) {
		if !strings.HasPrefix(block[1], "func ") {
			assert.Contains(t, examples, trimLines(block[1]))
			continue
		}
		for signature := range strings.SplitSeq("\n"+block[1], "\nfunc ") {
			if signature != "" {
				listed = append(listed, oneLine("func "+signature))
			}
		}
	}
	assert.ElementsMatch(t, signatures(t), listed)
}

// signatures are the exported functions and methods of the package, but for those of errors.
func signatures(t *testing.T) []string {
	t.Helper()
	files, err := filepath.Glob("*.go")
	require.NoError(t, err)
	var all []string
	for _, name := range files {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		set := token.NewFileSet()
		file, err := parser.ParseFile(set, name, nil, 0)
		require.NoError(t, err)
		for _, decl := range file.Decls {
			f, ok := decl.(*ast.FuncDecl)
			if !ok || !f.Name.IsExported() {
				continue
			}
			f.Body = nil
			var text strings.Builder
			require.NoError(t, printer.Fprint(&text, set, f))
			all = append(all, oneLine(text.String()))
		}
	}
	return slices.DeleteFunc(all, func(signature string) bool {
		return strings.Contains(signature, "*LostError)")
	})
}

func oneLine(signature string) string {
	text := strings.Join(strings.Fields(signature), " ")
	return strings.NewReplacer("( ", "(", ", )", ")").Replace(text)
}

func exampleLines(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile("example_test.go")
	require.NoError(t, err)
	return trimLines(string(text))
}

func trimLines(text string) string {
	var all strings.Builder
	for line := range strings.Lines(text) {
		all.WriteString(strings.TrimSpace(line) + "\n")
	}
	return all.String()
}
