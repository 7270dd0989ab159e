package stampede;

import java.util.Arrays;
import java.util.Locale;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.locks.LockSupport;

import org.redisson.api.RLock;

/** Measures Redisson's lock from the side of its user. */
final class Benchmark {
    /** Long enough that all waiters wait at each hand-over. */
    static final long HOLD_MICROS = 1_000;

    private final long[] nanos;
    private int measured;
    private final long began = System.nanoTime();
    private long ended;

    private Benchmark(int max) {
        nanos = new long[max];
    }

    /** Lock and unlock by one thread without contention, for N rounds or N seconds. */
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
     * Measures from just before unlock() until lock() returns in the next holder. There is one more
     * thread than waiters: a thread that released the lock waits again once the next one has it, so that
     * each hand-over is to another thread.
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
                    long released = turn.released; // read first, so that earlier writes are visible
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

    /** The current turn, and the end of the previous one. */
    private static final class Turn {
        private long number;
        /** Used by the holder of the lock only; volatile, because Redis is no memory barrier. */
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
                    throw new IllegalStateException(e); // no thread interrupts
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
