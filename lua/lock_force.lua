#!lua flags=allow-oom
-- Takes a lock from its holder and wakes the waiters as a release does. The holder learns of the loss
-- when it renews or releases the lock.
--
-- A repeat must not take the lock from the next holder: the receipt keeps the call's answer, as in
-- lock_release.lua, and a late call finds a larger serial.
--
-- Runs at maxmemory too: full memory must not extend a lock.
--
-- KEYS
--   1  receipt  string: serial and answer of the last call that left them here
--   2  lock     hash: owner -> depth
-- ARGV
--   1  serial      of this call, larger than any earlier one that used this receipt
--   2  receipt_ms  how long a repeat of this call is recognized
--   3  publish     publish, or spublish in a cluster, where Redisson listens to sharded channels
-- Answers
--   released  the lock was held
--   free      the lock was free

if not string.find(ARGV[1] .. ' ' .. ARGV[2], '^[1-9]%d* [1-9]%d*$') then
  return redis.error_reply('ERR arguments 1 and 2 must be whole numbers above 0')
end
if ARGV[3] ~= 'publish' and ARGV[3] ~= 'spublish' then
  return redis.error_reply('ERR argument 3 must be publish or spublish')
end

local last, answer = string.match(redis.call('GET', KEYS[1]) or '0', '^(%d+) ?(%a*)')
if tonumber(last) > tonumber(ARGV[1]) then
  return redis.error_reply('ERR stale: this call was abandoned')
elseif tonumber(last) == tonumber(ARGV[1]) then
  return answer
end

-- HLEN fails on a key of another type.
answer = redis.call('HLEN', KEYS[2]) > 0 and 'released' or 'free'
redis.call('SET', KEYS[1], ARGV[1] .. ' ' .. answer, 'PX', ARGV[2])
if answer == 'released' then
  redis.call('DEL', KEYS[2])
  local name = string.find(KEYS[2], '{', 1, true) and KEYS[2] or '{' .. KEYS[2] .. '}'
  redis.call(ARGV[3], 'redisson_lock__channel:' .. name, '0')
end
return answer
