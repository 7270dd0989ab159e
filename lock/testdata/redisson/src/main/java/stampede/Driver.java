package stampede;

import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.net.URI;
import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import java.util.HashMap;
import java.util.Map;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.Semaphore;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicLong;
import java.util.concurrent.locks.LockSupport;

import org.redisson.Redisson;
import org.redisson.api.RBucket;
import org.redisson.api.RLock;
import org.redisson.api.RedissonClient;
import org.redisson.client.codec.StringCodec;
import org.redisson.config.Config;

/**
 * Uses Redisson's locks as it is told on standard input:
 *
 * <pre>
 * java -cp … stampede.Driver [--cluster] REDIS_URL WATCHDOG_MS
 * </pre>
 *
 * It says {@code ready} when it is connected. Then a line {@code SESSION COMMAND ARGUMENT…} is answered by a
 * line {@code SESSION ANSWER…}. A session is a thread, because in Redisson the thread is the owner of a
 * lock: the commands of one session run one after another, those of several side by side, and their
 * answers come in any order. The program ends at the end of its input, and leaves its locks behind.
 *
 * <pre>
 * lock KEY [LEASE_MS]              waits for the lock: held. Without a lease, the watchdog keeps it up.
 * trylock KEY WAIT_MS LEASE_MS     held or busy. A lease of -1 is kept up by the watchdog.
 * unlock KEY                       released
 * force KEY                        released or free: takes the lock away from whoever has it.
 * waits SESSION                    yes if that session sleeps until a release of its lock is told, or no
 * count KEY COUNTER N              N times: lock, GET, one more, SET, unlock. The answer is: counted N
 * share KEY THREADS HOLD_US SECONDS
 *                                  THREADS take turns at the lock for so long: turns, and the longest wait. JSON.
 * bench-uncontended KEY N|Ns       N rounds, or N seconds of them, of lock and unlock. The answer is JSON.
 * bench-contended KEY WAITERS N [HOLD_US]
 *                                  N hand-overs among threads of which WAITERS wait at each. JSON.
 * </pre>
 *
 * What Redisson throws is answered as {@code error}. Figures of a fresh program are those of cold code:
 * a benchmark is run once for nothing.
 */
public final class Driver {
    private final RedissonClient redisson;
    private final Map<String, BlockingQueue<String[]>> sessions = new HashMap<>();
    private final Map<String, Thread> threads = new ConcurrentHashMap<>();

    private Driver(RedissonClient redisson) {
        this.redisson = redisson;
    }

    public static void main(String[] args) throws IOException {
        boolean cluster = args[0].equals("--cluster");
        if (cluster) {
            args = Arrays.copyOfRange(args, 1, args.length);
        }
        Driver driver = new Driver(Redisson.create(config(cluster, args[0], Long.parseLong(args[1]))));
        System.out.println("ready");
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = in.readLine(); line != null; line = in.readLine()) {
            String[] words = line.trim().split(" +");
            driver.session(words[0]).add(Arrays.copyOfRange(words, 1, words.length));
        }
        System.exit(0); // what the sessions still wait for, nobody wants to know
    }

    /** All else is Redisson's default. */
    private static Config config(boolean cluster, String redisUrl, long watchdogMillis) {
        Config config = new Config().setLockWatchdogTimeout(watchdogMillis);
        if (cluster) {
            config.useClusterServers().addNodeAddress(redisUrl);
            return config;
        }
        String path = URI.create(redisUrl).getPath();
        int database = path.length() > 1 ? Integer.parseInt(path.substring(1)) : 0;
        String address = redisUrl.substring(0, redisUrl.length() - path.length());
        config.useSingleServer().setAddress(address).setDatabase(database);
        return config;
    }

    /** Only the main thread asks for sessions. */
    private BlockingQueue<String[]> session(String name) {
        return sessions.computeIfAbsent(name, n -> {
            BlockingQueue<String[]> commands = new LinkedBlockingQueue<>();
            Thread thread = new Thread(() -> answer(n, commands), n);
            threads.put(n, thread);
            thread.start();
            return commands;
        });
    }

    private void answer(String session, BlockingQueue<String[]> commands) {
        while (true) {
            String answer;
            try {
                answer = run(commands.take());
            } catch (Exception e) {
                answer = ("error " + e).replace('\n', ' ');
            }
            System.out.println(session + " " + answer); // println is atomic
        }
    }

    private String run(String[] command) throws InterruptedException {
        if (command[0].equals("waits")) {
            // It is the one semaphore in the way of lock(), and stands behind the last look at the lock.
            Object blocker = LockSupport.getBlocker(threads.get(command[1]));
            return blocker != null && blocker.getClass().getName().startsWith(Semaphore.class.getName()) ? "yes" : "no";
        }
        RLock lock = redisson.getLock(command[1]);
        switch (command[0]) {
            case "lock":
                lock.lock(command.length > 2 ? Long.parseLong(command[2]) : -1, TimeUnit.MILLISECONDS);
                return "held";
            case "trylock":
                boolean held = lock.tryLock(Long.parseLong(command[2]), Long.parseLong(command[3]), TimeUnit.MILLISECONDS);
                return held ? "held" : "busy";
            case "unlock":
                lock.unlock();
                return "released";
            case "force":
                return lock.forceUnlock() ? "released" : "free";
            case "count":
                count(lock, redisson.getBucket(command[2], StringCodec.INSTANCE), Integer.parseInt(command[3]));
                return "counted " + command[3];
            case "share":
                return share(lock, Integer.parseInt(command[2]), Long.parseLong(command[3]), Integer.parseInt(command[4]));
            case "bench-uncontended":
                return Benchmark.uncontended(lock, command[2]).toString();
            case "bench-contended":
                long holdMicros = command.length > 4 ? Long.parseLong(command[4]) : Benchmark.HOLD_MICROS;
                return Benchmark.contended(lock, Integer.parseInt(command[2]), Integer.parseInt(command[3]), holdMicros).toString();
            default:
                throw new IllegalArgumentException("unknown command " + command[0]);
        }
    }

    private static String share(RLock lock, int count, long holdMicros, int seconds) throws InterruptedException {
        long end = System.nanoTime() + TimeUnit.SECONDS.toNanos(seconds);
        AtomicLong turns = new AtomicLong();
        AtomicLong longest = new AtomicLong();
        Thread[] threads = new Thread[count];
        for (int i = 0; i < count; i++) {
            threads[i] = new Thread(() -> {
                for (long began = System.nanoTime(); began < end; began = System.nanoTime()) {
                    lock.lock();
                    long waited = System.nanoTime() - began;
                    LockSupport.parkNanos(TimeUnit.MICROSECONDS.toNanos(holdMicros));
                    lock.unlock();
                    turns.incrementAndGet();
                    longest.accumulateAndGet(waited, Math::max);
                }
            });
            threads[i].start();
        }
        for (Thread thread : threads) {
            thread.join();
        }
        return String.format("{\"turns\":%d,\"longest_ms\":%d}", turns.get(), TimeUnit.NANOSECONDS.toMillis(longest.get()));
    }

    /** Without the lock, a count that comes between GET and SET is overwritten. */
    private static void count(RLock lock, RBucket<String> counter, int times) {
        for (int i = 0; i < times; i++) {
            lock.lock();
            try {
                String value = counter.get();
                counter.set(Long.toString(value == null ? 1 : Long.parseLong(value) + 1));
            } finally {
                lock.unlock();
            }
        }
    }
}
