#!lua flags=allow-oom
-- Takes locks for one owner without waiting. A lock is a hash with one field, owner -> depth, that
-- expires with its lease: the form of Redisson's RLock. The depth is always 1: each call has its own
-- owner, and reentries are counted in the owner's process.
--
-- A call may arrive twice, the second time after its caller has given up. Locks that it took are found
-- by their owner. A late repeat must not take locks that the call did not take: an acquire that got
-- less than it requested, and a release, leave their serial in the receipt. A waiting caller repeats
-- one call.
--
-- Runs at maxmemory too: the workers that free memory need a few bytes for seconds.
--
-- KEYS
--   1  receipt  string: the serial of the last call that left one, and more
--   2  fence    string: the last fencing token
--   3  lock     the first one: hash: owner -> depth
--   and so on: one for each further lock
-- ARGV
--   1  serial      of this call, larger than any earlier one that used this receipt
--   2  receipt_ms  how long a repeat of this call is recognized if it gets less than it requests; 0 for
--                  a caller that repeats the call and releases in the end
--   3  owner       who takes the locks: unique to this call and its repeats
--   4  lease_ms    how long the locks last from now
--   5  mode        each: every lock that is free; all: every lock, or none of them
--   6  listeners   numsub, or shardnumsub in a cluster, to count the connections that listen for the
--                  release of a busy lock; or none
--   7  kept        kept, or vanishing for locks that neither the append-only file nor a replica gets
-- Answers
--   {token, wait_ms, listeners, answer, answer, ...}, one answer for each lock, in the order given
--   token is the fencing token of all held locks, a decimal string, or 0 if none is held. It is larger
--   than any earlier token of the same fence, also after a loss of the fence, unless Redis's clock is
--   set back.
--   wait_ms is when the busy locks are free unless they are renewed, 0 if unknown.
--   listeners is how many connections listen for the first busy lock, 0 if not counted.
--   held  the owner holds the lock
--   busy  another owner holds it
--   free  the lock is free, and was not taken because another one is busy

-- A day: longer than a token can be ahead of Redis's clock. Numbers are strings here, so that Redis need not
-- convert them.
local fence_ms = '86400000'

if #KEYS < 3 or #ARGV ~= 7 then
  return redis.error_reply('ERR lock_acquire takes a receipt, a fence, locks and seven arguments')
end
if not string.find(ARGV[1] .. ' ' .. ARGV[2] .. ' ' .. ARGV[4], '^[1-9]%d* %d+ [1-9]%d*$') then
  return redis.error_reply('ERR the serial and the lease must be whole numbers above 0, receipt_ms 0 or more')
end
local each = ARGV[5] == 'each'
if not each and ARGV[5] ~= 'all' then
  return redis.error_reply('ERR the mode must be each or all')
end
if ARGV[7] == 'vanishing' then
  pcall(redis.set_repl, redis.REPL_NONE) -- a server without it logs them
elseif ARGV[7] ~= 'kept' then
  return redis.error_reply('ERR argument 7 must be kept or vanishing')
end

local owner, lease_ms = ARGV[3], ARGV[4]
local fresh = true -- no earlier attempt of this call has left a receipt
local receipt = redis.call('GET', KEYS[1])
if receipt then
  local last, serial = tonumber(string.match(receipt, '^%d+')), tonumber(ARGV[1])
  if last > serial then
    return redis.error_reply('ERR stale: this call was abandoned')
  end
  fresh = last < serial
end

-- All locks are read before the first write, so that a key of another type rejects the whole call. One EXISTS is
-- enough if all are free, which is the common case.
local answers, first_busy, held, free, wait_ms = { '0', 0, 0 }, nil, false, false, 0
if fresh and redis.call('EXISTS', unpack(KEYS, 3)) == 0 then
  free = true
  for i = 3, #KEYS do answers[i + 1] = 'free' end
else
  for i = 3, #KEYS do
    local left_ms = redis.call('PTTL', KEYS[i]) -- -2 if there is no such key
    local answer = 'busy'
    if left_ms == -2 then
      if fresh then answer, free = 'free', true end -- otherwise busy, as it was answered before
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
  -- Microseconds since 1970: sixteen digits until the year 2286, so they compare as text.
  local now = redis.call('TIME')
  local token = now[1] .. string.sub('00000' .. now[2], -6)
  local before = redis.call('SET', KEYS[2], token, 'PX', fence_ms, 'GET')
  if before and (#before > #token or (#before == #token and before >= token)) then
    token = string.format('%.0f', before + 1)
    redis.call('SET', KEYS[2], token, 'PX', fence_ms)
  end
  answers[1] = token

  local taken -- the first new lock; the others are copies of it, with one command for each
  for i = 3, #KEYS do
    if answers[i + 1] == 'free' then
      if not taken then
        taken = KEYS[i]
        redis.call('HSET', taken, owner, '1')
        redis.call('PEXPIRE', taken, lease_ms)
      elseif taken ~= KEYS[i] then -- a key may be given twice
        redis.call('COPY', taken, KEYS[i])
      end
      answers[i + 1] = 'held'
    elseif answers[i + 1] == 'held' then
      redis.call('PEXPIRE', KEYS[i], lease_ms, 'GT') -- it may have been renewed for longer
    end
  end
end
if held and not takes then
  -- An earlier attempt took all locks and has lost one since. A caller with mode all holds none while it waits.
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
    -- pcall: the count is a hint, and a user of Redis may lack the right to PUBSUB.
    answers[3] = redis.pcall('PUBSUB', ARGV[6], 'redisson_lock__channel:' .. name)[2] or 0
  end
end
return answers
