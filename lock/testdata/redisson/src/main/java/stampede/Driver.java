package stampede;

import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.net.URI;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.Semaphore;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicLong;
import java.util.concurrent.locks.LockSupport;

import org.redisson.Redisson;
import org.redisson.RedissonMultiLock;
import org.redisson.api.RBucket;
import org.redisson.api.RLock;
import org.redisson.api.RedissonClient;
import org.redisson.client.codec.StringCodec;
import org.redisson.config.Config;

/**
 * Uses Redisson's locks on command from standard input:
 *
 * <pre>
 * java -cp … stampede.Driver [--cluster] REDIS_URL,REDIS_URL… WATCHDOG_MS
 * </pre>
 *
 * It prints {@code ready} when it is connected. Then it answers each line {@code SESSION COMMAND ARGUMENT…}
 * with a line {@code SESSION ANSWER…}. A session is a thread, because in Redisson the thread owns a lock:
 * the commands of one session run in order, and those of several sessions concurrently. The program ends
 * with its input and releases no locks.
 *
 * <pre>
 * lock KEY [LEASE_MS]              waits for the lock: held. Without a lease, the watchdog renews it.
 * trylock KEY WAIT_MS LEASE_MS     held or busy. The watchdog renews a lease of -1.
 * unlock KEY                       released
 * force KEY                        released or free: takes the lock from its holder
 * waits SESSION                    yes if the session sleeps until a release message, or no
 * count KEY COUNTER N              N times: lock, GET, add one, SET, unlock. Answers: counted N
 * share KEY THREADS HOLD_US SECONDS
 *                                  THREADS take turns at the lock. Answers turns and the longest wait as JSON.
 * bench-uncontended KEY N|Ns       N rounds or N seconds of lock and unlock. Answers JSON.
 * bench-contended KEY WAITERS N [HOLD_US]
 *                                  N hand-overs with WAITERS waiting threads. Answers JSON.
 * </pre>
 *
 * A key is in the first Redis. Keys with a plus between them, or after them, are one RedissonMultiLock of these
 * keys in all servers. Exceptions of Redisson are answered as {@code error}. The first benchmark of a process measures cold
 * code and does not count.
 */
public final class Driver {
    private final List<RedissonClient> servers;
    private final RedissonClient redisson; // the first server
    private final Map<String, BlockingQueue<String[]>> sessions = new HashMap<>();
    private final Map<String, Thread> threads = new ConcurrentHashMap<>();

    private Driver(List<RedissonClient> servers) {
        this.servers = servers;
        this.redisson = servers.get(0);
    }

    public static void main(String[] args) throws IOException {
        boolean cluster = args[0].equals("--cluster");
        if (cluster) {
            args = Arrays.copyOfRange(args, 1, args.length);
        }
        List<RedissonClient> servers = new ArrayList<>();
        for (String url : args[0].split(",")) {
            servers.add(Redisson.create(config(cluster, url, Long.parseLong(args[1]))));
        }
        Driver driver = new Driver(servers);
        System.out.println("ready");
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = in.readLine(); line != null; line = in.readLine()) {
            String[] words = line.trim().split(" +");
            driver.session(words[0]).add(Arrays.copyOfRange(words, 1, words.length));
        }
        System.exit(0); // although sessions may still wait
    }

    /** Everything else is Redisson's default. */
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

    /** Called by the main thread only. */
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
            // lock() waits on one semaphore only, after its last attempt to take the lock.
            Object blocker = LockSupport.getBlocker(threads.get(command[1]));
            return blocker != null && blocker.getClass().getName().startsWith(Semaphore.class.getName()) ? "yes" : "no";
        }
        RLock lock = lock(command[1]);
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

    private RLock lock(String name) {
        if (!name.contains("+")) {
            return redisson.getLock(name);
        }
        List<RLock> locks = new ArrayList<>();
        for (RedissonClient server : servers) {
            for (String key : name.split("\\+")) {
                locks.add(server.getLock(key));
            }
        }
        return new RedissonMultiLock(locks.toArray(new RLock[0]));
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

    /** Without the lock, a count between GET and SET would be lost. */
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
