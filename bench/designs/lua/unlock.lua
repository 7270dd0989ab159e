-- Releases a lock if the caller still owns it: the script of the Redis documentation on SET. Without
-- the comparison, a late caller would delete another owner's lock.
--
-- KEYS
--   1  lock   string: its owner
-- ARGV
--   1  owner  of the caller's lock
-- Answers 1 if it was released, and 0 if the caller is no longer its owner.
if redis.call('GET', KEYS[1]) == ARGV[1] then
  return redis.call('DEL', KEYS[1])
end
return 0
