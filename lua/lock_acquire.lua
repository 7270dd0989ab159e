#!lua flags=allow-oom
-- Takes locks for one owner, and waits for none. A lock is a hash with one field, owner -> depth, that
-- lives as long as its lease: the form of Redisson's RLock. The depth is always 1, because an owner
-- counts by itself how often it holds what it has; every call of this script has an owner of its own.
--
-- A call may come twice, and the second time when nobody waits for it any more. What was taken is known
-- by its owner. What was not taken then must not be taken by a call that was stuck on its way: the
-- call's serial is left in its receipt when it got less than it asked for, and when it was released.
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
--   2  receipt_ms  how long a repeat of this call is known as one
--   3  owner       who takes the locks: unique to this call and its repeats
--   4  lease_ms    how long the locks last
--   5  mode        each: every lock that is free; all: every lock, or none of them
-- Answers
--   {token, wait_ms, answer, answer, ...}, one for each lock, in the order given
--   token is the fencing token of all that is held: larger than any that was given before for the same
--   fence, also if Redis lost it, as long as its clock is not set back. It is 0 if nothing is held.
--   wait_ms is after how long the busy locks are free if nobody renews them, 0 if that is not known.
--   held  the owner holds the lock
--   busy  another owner holds it
--   free  nobody holds it, and it was left alone because another one is busy

local clock_us_per_s = 1000000

-- Longer than clocks are set back, and so than the last token can be ahead of Redis's clock.
local fence_ms = 86400000

if #KEYS < 3 or #ARGV ~= 5 then
  return redis.error_reply('ERR lock_acquire takes a receipt, a fence, locks, and five arguments')
end
for _, i in ipairs({ 1, 2, 4 }) do
  if not string.find(ARGV[i], '^[1-9]%d*$') then
    return redis.error_reply('ERR argument ' .. i .. ' must be a whole number above 0')
  end
end
local each = ARGV[5] == 'each'
if not each and ARGV[5] ~= 'all' then
  return redis.error_reply('ERR the mode must be each or all')
end

local serial, owner, lease_ms = tonumber(ARGV[1]), ARGV[3], ARGV[4]
local last = tonumber(string.match(redis.call('GET', KEYS[1]) or '0', '^%d+'))
if last > serial then
  return redis.error_reply('ERR stale: this call was given up')
end

-- All locks are looked at before anything is written: a key of another type refuses the whole call.
local answers, busy, held, free, wait_ms = { 0, 0 }, false, false, false, 0
for i = 3, #KEYS do
  if redis.call('HLEN', KEYS[i]) == 0 then
    if last < serial then
      answers[i], free = 'free', true
    else
      answers[i], busy = 'busy', true -- as it was when the first of these calls was answered
    end
  elseif redis.call('HEXISTS', KEYS[i], owner) == 1 then
    answers[i], held = 'held', true
  else
    answers[i], busy = 'busy', true
    wait_ms = math.max(wait_ms, redis.call('PTTL', KEYS[i]) + 1)
  end
end
local takes = free and (each or not busy)

if held or takes then
  local now = redis.call('TIME')
  local token = now[1] * clock_us_per_s + now[2]
  local before = tonumber(redis.call('SET', KEYS[2], string.format('%.0f', token), 'PX', fence_ms, 'GET') or 0) or 0
  if before >= token then
    token = before + 1
    redis.call('SET', KEYS[2], string.format('%.0f', token), 'PX', fence_ms)
  end
  answers[1] = token
end
if takes then
  for i = 3, #KEYS do
    if answers[i] == 'free' then
      redis.call('HSET', KEYS[i], owner, 1)
      redis.call('PEXPIRE', KEYS[i], lease_ms)
      answers[i] = 'held'
    end
  end
end
if busy then
  answers[2] = wait_ms
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
end
return answers
