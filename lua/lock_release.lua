#!lua flags=allow-oom
-- Releases locks of one owner and wakes the waiters as Redisson does: with the message 0 on a channel
-- named after the lock. Locks of other owners stay.
--
-- A repeat must distinguish a lock that it released from one that was lost before: the receipt keeps
-- the answers. Receipts are reused, so that there are about as many as concurrent calls. A late call
-- finds a larger serial and changes nothing.
--
-- Runs at maxmemory too: full memory must not extend a lock.
--
-- KEYS
--   1  receipt  string: serial and answers of the last call that left them here
--   2  lock     the first one: hash: owner -> depth
--   and so on: one for each further lock
-- ARGV
--   1  serial      of this call, larger than any earlier one that used this receipt
--   2  receipt_ms  how long a repeat of this call is recognized
--   3  owner       who took the locks
--   4  publish     publish, or spublish in a cluster, where Redisson listens to sharded channels
--   5  kept        as the locks were taken: kept; or vanishing, for which nobody listens
-- Answers
--   {answer, answer, ...}, one for each lock, in the order given
--   released  the owner held the lock, which is now free
--   notified <n>  released, and n connections received the message; a repeat answers released
--   lost      the owner did not hold the lock: its lease had ended, or it was forced

if #KEYS < 2 or #ARGV ~= 5 then
  return redis.error_reply('ERR lock_release takes a receipt, locks and five arguments')
end
if not string.find(ARGV[1] .. ' ' .. ARGV[2], '^[1-9]%d* [1-9]%d*$') then
  return redis.error_reply('ERR arguments 1 and 2 must be whole numbers above 0')
end
if ARGV[4] ~= 'publish' and ARGV[4] ~= 'spublish' then
  return redis.error_reply('ERR argument 4 must be publish or spublish')
end
if ARGV[5] == 'vanishing' then
  pcall(redis.set_repl, redis.REPL_NONE) -- a server without it logs them
elseif ARGV[5] ~= 'kept' then
  return redis.error_reply('ERR argument 5 must be kept or vanishing')
end

-- A repeated or late call finds its locks gone. Only then is the receipt read.
local answers, letters, lost = {}, {}, false
for i = 2, #KEYS do
  -- pcall: a key overwritten with another type is a lost lock. The rest is released.
  if redis.pcall('HDEL', KEYS[i], ARGV[3]) == 1 then
    answers[i - 1], letters[i - 1] = 'released', 'r'
    if ARGV[5] == 'kept' then
      local name = string.find(KEYS[i], '{', 1, true) and KEYS[i] or '{' .. KEYS[i] .. '}'
      local receivers = redis.call(ARGV[4], 'redisson_lock__channel:' .. name, '0')
      if receivers > 0 then answers[i - 1] = 'notified ' .. receivers end
    end
  else
    answers[i - 1], letters[i - 1], lost = 'lost', 'l', true
  end
end

if lost then
  local receipt = redis.call('GET', KEYS[1]) or '0'
  local last, serial = tonumber(string.match(receipt, '^%d+')), tonumber(ARGV[1])
  if last > serial then
    return redis.error_reply('ERR stale: this call was abandoned')
  elseif last == serial then
    local i = 0
    for letter in string.gmatch(receipt, '%a') do
      i = i + 1
      answers[i] = letter == 'r' and 'released' or 'lost'
    end
    return answers
  end
end
redis.call('SET', KEYS[1], ARGV[1] .. ' ' .. table.concat(letters), 'PX', ARGV[2])
return answers
