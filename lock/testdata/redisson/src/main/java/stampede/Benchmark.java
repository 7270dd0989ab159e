package stampede;

import java.util.Arrays;
import java.util.Locale;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.locks.LockSupport;

import org.redisson.api.RLock;

/** What Redisson's lock costs, measured where its user stands. */
final class Benchmark {
    /** Long enough that all waiters wait when the lock is handed over. */
    static final long HOLD_MICROS = 1_000;

    private final long[] nanos;
    private int measured;
    private final long began = System.nanoTime();
    private long ended;

    private Benchmark(int max) {
        nanos = new long[max];
    }

    /** Lock and unlock by one thread, which waits for nobody: N rounds, or as many as N seconds have. */
    static Benchmark uncontended(RLock lock, String rounds) {
        boolean timed = rounds.endsWith("s");
        int n = Integer.parseInt(timed ? rounds.substring(0, rounds.length() - 1) : rounds);
        Benchmark b = new Benchmark(timed ? n * 200_000 : n);
        long end = timed ? System.nanoTime() + TimeUnit.SECONDS.toNanos(n) : Long.MAX_VALUE;
        while (b.measured < b.nanos.length && System.nanoTime() < end) {
            long start = System.nanoTime();
            lock.lock();
            lock.unlock();
            b.add(System.nanoTime() - start);
        }
        return b;
    }

    /**
     * From just before unlock() until the return of lock() in the next holder. One more thread than
     * waiters takes part: whoever released the lock queues again only when it has its next holder, so that
     * each hand-over is one to another thread.
     */
    static Benchmark contended(RLock lock, int waiters, int handOvers, long holdMicros) throws InterruptedException {
        Benchmark b = new Benchmark(handOvers);
        Turn turn = new Turn();
        Thread[] threads = new Thread[waiters + 1];
        for (int i = 0; i < threads.length; i++) {
            threads[i] = new Thread(() -> {
                while (true) {
                    lock.lock();
                    long now = System.nanoTime();
                    long released = turn.released; // first of all, so that what was written before it is seen
                    if (b.measured == b.nanos.length) {
                        lock.unlock();
                        return;
                    }
                    if (released != 0) {
                        b.add(now - released);
                    }
                    long mine = turn.next();
                    LockSupport.parkNanos(TimeUnit.MICROSECONDS.toNanos(holdMicros));
                    boolean last = b.measured == b.nanos.length;
                    turn.released = System.nanoTime();
                    lock.unlock();
                    if (last) {
                        return;
                    }
                    turn.awaitNextAfter(mine);
                }
            });
        }
        for (Thread t : threads) {
            t.start();
        }
        for (Thread t : threads) {
            t.join();
        }
        return b;
    }

    /** Whose turn it is, and when the turn before ended. */
    private static final class Turn {
        private long number;
        /** Written and read by the holder of the lock only; volatile, as Redis is no memory barrier. */
        volatile long released;

        synchronized long next() {
            notifyAll();
            return ++number;
        }

        synchronized void awaitNextAfter(long mine) {
            while (number == mine) {
                try {
                    wait();
                } catch (InterruptedException e) {
                    throw new IllegalStateException(e); // nobody interrupts
                }
            }
        }
    }

    private void add(long took) {
        nanos[measured++] = took;
        ended = System.nanoTime();
    }

    @Override
    public String toString() {
        long[] sorted = Arrays.copyOf(nanos, measured);
        Arrays.sort(sorted);
        return String.format(Locale.ROOT, "{\"n\":%d,\"median_ns\":%d,\"p99_ns\":%d,\"seconds\":%.3f}",
                measured, sorted[measured / 2], sorted[(int) (measured * 0.99)], (ended - began) / 1e9);
    }
}
