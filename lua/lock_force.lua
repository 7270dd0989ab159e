#!lua flags=allow-oom
-- Takes a lock away from whoever holds it, and wakes those who wait for it as a release does. Its
-- holder hears of it when it renews or releases the lock.
--
-- KEYS
--   1  lock  hash: owner -> depth
-- ARGV
--   1  publish  publish, or spublish in a cluster, where Redisson listens to sharded channels
-- Answers
--   released  somebody held the lock
--   free      nobody did

if ARGV[1] ~= 'publish' and ARGV[1] ~= 'spublish' then
  return redis.error_reply('ERR argument 1 must be publish or spublish')
end

-- HLEN refuses a key that is no lock.
if redis.call('HLEN', KEYS[1]) == 0 then return 'free' end

redis.call('DEL', KEYS[1])
local name = string.find(KEYS[1], '{', 1, true) and KEYS[1] or '{' .. KEYS[1] .. '}'
redis.call(ARGV[1], 'redisson_lock__channel:' .. name, '0')
return 'released'
