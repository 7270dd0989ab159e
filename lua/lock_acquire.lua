#!lua flags=allow-oom
-- Takes locks for one owner, and waits for none. A lock is a hash with one field, owner -> depth, that
-- lives as long as its lease: the form of Redisson's RLock. The depth is always 1, because an owner
-- counts by itself how often it holds what it has; every call of this script has an owner of its own.
--
-- A call may come twice, and the second time when nobody waits for it any more. What was taken is known
-- by its owner. What was not taken then must not be taken by a call that was stuck on its way: so the
-- call's serial is left in its receipt when it was answered for good with less than it asked for, and
-- when it was released. Whoever waits for a lock asks again and again by the same call.
--
-- Runs at maxmemory too: a few bytes that live for seconds must not stop those who drain what fills it.
--
-- KEYS
--   1  receipt  string: the serial of the last call that left one here, and more
--   2  fence    string: the last fencing token that was given
--   3  lock     the first one: hash: owner -> depth
--   and so on: one for every further lock
-- ARGV
--   1  serial      of this call, larger than any earlier one that used this receipt
--   2  receipt_ms  how long a repeat of this call is known as one, if it gets less than it asks for; 0 for
--                  a caller that will ask again, and in the end release
--   3  owner       who takes the locks: unique to this call and its repeats
--   4  lease_ms    how long the locks last from now
--   5  mode        each: every lock that is free; all: every lock, or none of them
--   6  listeners   numsub, or shardnumsub in a cluster, to tell how many listen for the release of a busy
--                  lock; none
-- Answers
--   {token, wait_ms, listeners, answer, answer, ...}, one answer for each lock, in the order given
--   token is the fencing token of all that is held, a decimal number in a string: larger than any that was
--   given before for the same fence, also if Redis lost it, as long as its clock is not set back. It is 0 if
--   nothing is held.
--   wait_ms is after how long the busy locks are free if nobody renews them, 0 if that is not known.
--   listeners is how many connections wait for the first busy lock; 0 if none is, or it was not asked for.
--   held  the owner holds the lock
--   busy  another owner holds it
--   free  nobody holds it, and it was left alone because another one is busy

-- Longer than clocks are set back, and so than the last token can be ahead of Redis's clock. A string, as
-- the 1 below, because Redis would have to make one of a number.
local fence_ms = '86400000'

if #KEYS < 3 or #ARGV ~= 6 then
  return redis.error_reply('ERR lock_acquire takes a receipt, a fence, locks, and six arguments')
end
if not string.find(ARGV[1] .. ' ' .. ARGV[2] .. ' ' .. ARGV[4], '^[1-9]%d* %d+ [1-9]%d*$') then
  return redis.error_reply('ERR the serial and the times must be whole numbers, and but for the second above 0')
end
local each = ARGV[5] == 'each'
if not each and ARGV[5] ~= 'all' then
  return redis.error_reply('ERR the mode must be each or all')
end

local owner, lease_ms = ARGV[3], ARGV[4]
local fresh = true -- no earlier try of this call was answered for good
local receipt = redis.call('GET', KEYS[1])
if receipt then
  local last, serial = tonumber(string.match(receipt, '^%d+')), tonumber(ARGV[1])
  if last > serial then
    return redis.error_reply('ERR stale: this call was given up')
  end
  fresh = last < serial
end

-- All locks are looked at before anything is written: a key of another type refuses the whole call. Mostly nobody
-- holds any of them, and then one look is enough.
local answers, first_busy, held, free, wait_ms = { '0', 0, 0 }, nil, false, false, 0
if fresh and redis.call('EXISTS', unpack(KEYS, 3)) == 0 then
  free = true
  for i = 3, #KEYS do answers[i + 1] = 'free' end
else
  for i = 3, #KEYS do
    local left_ms = redis.call('PTTL', KEYS[i]) -- -2 if there is no such key
    local answer = 'busy'
    if left_ms == -2 then
      if fresh then answer, free = 'free', true end -- or busy, as it was when that try was answered
    elseif redis.call('HEXISTS', KEYS[i], owner) == 1 then
      answer, held = 'held', true
    else
      wait_ms = math.max(wait_ms, left_ms + 1)
    end
    if answer == 'busy' then first_busy = first_busy or KEYS[i] end
    answers[i + 1] = answer
  end
end
local takes = (free or held) and (each or not first_busy)

if takes then
  -- Microseconds since 1970: sixteen digits, today and for a long time, so they compare as text.
  local now = redis.call('TIME')
  local token = now[1] .. string.sub('00000' .. now[2], -6)
  local before = redis.call('SET', KEYS[2], token, 'PX', fence_ms, 'GET')
  if before and (#before > #token or (#before == #token and before >= token)) then
    token = string.format('%.0f', before + 1)
    redis.call('SET', KEYS[2], token, 'PX', fence_ms)
  end
  answers[1] = token

  local taken -- a lock of this call: the others are copies of it, value and lease, by one command for each
  for i = 3, #KEYS do
    if answers[i + 1] == 'free' then
      if not taken then
        taken = KEYS[i]
        redis.call('HSET', taken, owner, '1')
        redis.call('PEXPIRE', taken, lease_ms)
      elseif taken ~= KEYS[i] then -- a name may come twice
        redis.call('COPY', taken, KEYS[i])
      end
      answers[i + 1] = 'held'
    elseif answers[i + 1] == 'held' then
      redis.call('PEXPIRE', KEYS[i], lease_ms, 'GT') -- it may have been renewed for longer
    end
  end
end
if held and not takes then
  -- An earlier try took all, and lost one since: whoever wants all holds none while it waits.
  for i = 3, #KEYS do
    if answers[i + 1] == 'held' then
      redis.call('HDEL', KEYS[i], owner)
      answers[i + 1] = 'free'
    end
  end
end
if first_busy then
  answers[2] = wait_ms
  if ARGV[2] ~= '0' then redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2]) end
  if ARGV[6] ~= 'none' then
    local name = string.find(first_busy, '{', 1, true) and first_busy or '{' .. first_busy .. '}'
    -- pcall: it is a hint, to which not every user of Redis has the right.
    answers[3] = redis.pcall('PUBSUB', ARGV[6], 'redisson_lock__channel:' .. name)[2] or 0
  end
end
return answers
