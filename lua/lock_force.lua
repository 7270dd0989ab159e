#!lua flags=allow-oom
-- Takes a lock away from whoever holds it, and wakes those who wait for it as a release does. Its
-- holder hears of it when it renews or releases the lock.
--
-- KEYS
--   1  lock  hash: owner -> depth
-- Answers
--   released  somebody held the lock
--   free      nobody did

-- HLEN refuses a key that is no lock.
if redis.call('HLEN', KEYS[1]) == 0 then return 'free' end

redis.call('DEL', KEYS[1])
local name = string.find(KEYS[1], '{', 1, true) and KEYS[1] or '{' .. KEYS[1] .. '}'
redis.call('PUBLISH', 'redisson_lock__channel:' .. name, '0')
return 'released'
