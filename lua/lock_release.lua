#!lua flags=allow-oom
-- Gives up one hold of one owner on each of many locks; a lock of which no hold is left is free.
-- Nobody's lock is touched but the owner's.
--
-- The caller says how deep it remains, where Redisson subtracts one, so that a repeat subtracts
-- nothing. A repeat also has to tell a lock that it released itself from one that was lost before:
-- the answers are kept under the call's own name for as long as a repeat may come.
--
-- Runs at maxmemory too: a lock must not last longer because memory is full.
--
-- KEYS
--   1  receipt  string: the answers to this call, for its repeats
--   2  lock     of the first key: hash: owner -> depth
--   and so on: one for every further key
-- ARGV
--   1  owner       who took the locks
--   2  receipt_ms  how long a repeat of this call is known as one
--   3  depth       that the owner keeps in the first lock: 0 to give it up
--   and so on: one for every further key
-- Answers
--   {answer, answer, ...}, one for each key, in the order given
--   released  the owner does not hold the lock any more
--   kept      the owner holds the lock, at that depth
--   lost      the owner did not hold the lock: its lease had ended, or it was taken away

if #KEYS < 2 or #ARGV ~= #KEYS + 1 then
  return redis.error_reply('ERR lock_release takes an owner, a time and a depth for each key')
end
for i = 2, #ARGV do
  if not string.find(ARGV[i], '^%d+$') then
    return redis.error_reply('ERR argument ' .. i .. ' must be a whole number')
  end
end

local receipt = table.remove(KEYS, 1) -- what remains are the locks

local before = {}
for answer in string.gmatch(redis.call('GET', receipt) or '', '%S+') do
  before[#before + 1] = answer
end

local answers = {}
for i, key in ipairs(KEYS) do
  -- pcall: a key that was overwritten with another type is a lost lock, and must not keep the rest.
  if redis.pcall('HEXISTS', key, ARGV[1]) ~= 1 then
    answers[i] = before[i] == 'released' and 'released' or 'lost'
  elseif ARGV[i + 2] == '0' then
    redis.call('HDEL', key, ARGV[1])
    answers[i] = 'released'
  else
    redis.call('HSET', key, ARGV[1], ARGV[i + 2])
    answers[i] = 'kept'
  end
end

redis.call('SET', receipt, table.concat(answers, ' '), 'PX', ARGV[2])
return answers
