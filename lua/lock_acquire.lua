#!lua flags=allow-oom
-- Takes many locks for one owner, each one or not at all, and waits for none. A lock is a hash with
-- one field, owner -> depth, that lives as long as its lease: the form that Redisson gives its RLock.
--
-- The caller says how deep it is going to be, where Redisson adds one. So the same call sent twice,
-- as go-redis does when a reply is lost, leaves the same depth as sent once.
--
-- Runs at maxmemory too: a few bytes that live for seconds must not stop those who drain what fills it.
--
-- KEYS
--   1  lock  of the first key: hash: owner -> depth
--   and so on: one for every further key
-- ARGV
--   1  owner     who takes the locks
--   2  lease_ms  how long they last; a deeper hold may lengthen what is left, never shorten it
--   3  depth     that the owner reaches in the first lock: 1, or more if it holds the lock already
--   and so on: one for every further key
-- Answers
--   {answer, answer, ...}, one for each key, in the order given
--   held  the owner holds the lock, at that depth
--   busy  another owner holds it
--   lost  the owner was to go deeper into a lock that it does not hold any more: nothing was done

if #KEYS < 1 or #ARGV ~= #KEYS + 2 then
  return redis.error_reply('ERR lock_acquire takes an owner, a lease and a depth for each key')
end
for i = 2, #ARGV do
  if not string.find(ARGV[i], '^[1-9]%d*$') then
    return redis.error_reply('ERR argument ' .. i .. ' must be a whole number above 0')
  end
end

-- All keys are looked at before the first is written: a key of another type refuses the whole call.
local answers, taken = {}, {}
for i, key in ipairs(KEYS) do
  taken[i] = redis.call('HLEN', key) > 0
  local ours = taken[i] and redis.call('HEXISTS', key, ARGV[1]) == 1
  if not ours and tonumber(ARGV[i + 2]) > 1 then
    answers[i] = 'lost'
  elseif taken[i] and not ours then
    answers[i] = 'busy'
  else
    answers[i] = 'held'
  end
end

for i, key in ipairs(KEYS) do
  if answers[i] == 'held' then
    redis.call('HSET', key, ARGV[1], ARGV[i + 2])
    if taken[i] then
      redis.call('PEXPIRE', key, ARGV[2], 'GT')
    else
      redis.call('PEXPIRE', key, ARGV[2])
    end
  end
end
return answers
