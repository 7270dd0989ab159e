-- Writes a mark that vanishes after a second, so that a client can measure how long a write takes that must survive, and
-- how long one that need not.
--
-- KEYS
--   1  mark
-- ARGV
--   1  logged  1 if the append-only file and the replicas get the mark, else 0
-- Answers
--   OK

if ARGV[1] ~= '1' then pcall(redis.set_repl, redis.REPL_NONE) end -- a server without it logs the mark
return redis.call('SET', KEYS[1], '', 'PX', 1000)
