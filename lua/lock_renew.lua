#!lua flags=allow-oom
-- Renews the leases of locks, and never shortens one. A lock that its owner no longer holds is reported
-- and not taken again, because another owner may have held it meanwhile.
--
-- KEYS
--   1  lock  the first one: hash: owner -> depth
--   and so on: one for each further lock
-- ARGV
--   1  lease_ms  how long the locks last from now
--   2  kept      as the locks were taken: kept or vanishing
--   3  owner     of the first lock
--   and so on: one for each further lock
-- Answers
--   {answer, answer, ...}, one for each lock, in the order given
--   renewed  the owner holds the lock, for at least the lease
--   lost     the owner does not hold the lock

if #KEYS < 1 or #ARGV ~= #KEYS + 2 then
  return redis.error_reply('ERR lock_renew takes a lease, kept or vanishing, and an owner for each lock')
end
if not string.find(ARGV[1], '^[1-9]%d*$') then
  return redis.error_reply('ERR the lease must be a whole number above 0')
end
if ARGV[2] == 'vanishing' then
  pcall(redis.set_repl, redis.REPL_NONE) -- a server without it logs them
elseif ARGV[2] ~= 'kept' then
  return redis.error_reply('ERR argument 2 must be kept or vanishing')
end

local answers = {}
for i, key in ipairs(KEYS) do
  -- pcall: a key overwritten with another type is a lost lock. The rest is renewed.
  if redis.pcall('HEXISTS', key, ARGV[i + 2]) == 1 then
    redis.call('PEXPIRE', key, ARGV[1], 'GT')
    answers[i] = 'renewed'
  else
    answers[i] = 'lost'
  end
end
return answers
