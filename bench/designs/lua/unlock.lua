-- Gives a lock back if the caller still is its owner: the script of the Redis documentation on SET.
-- Without the comparison, whoever is late would delete the lock of somebody else.
--
-- KEYS
--   1  lock   string: its owner
-- ARGV
--   1  owner  of the caller's lock
-- Answers 1 if it was given back, and 0 if the caller is not its owner any more.
if redis.call('GET', KEYS[1]) == ARGV[1] then
  return redis.call('DEL', KEYS[1])
end
return 0
