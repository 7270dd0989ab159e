-- Sells the units of a sale with a waiting list to everybody again, because nobody waits for them.
--
-- KEYS
--   1  sale  hash, as in reserve.lua
-- ARGV
--   1  epoch  of the sale's stock that the caller expects
-- Answers
--   reopened      the sale has the open state waitlist
--   unchanged     it had it before, or nothing is left
--   unknown-sale  there is no such sale
--   stale-epoch   the sale's stock was rebuilt since the caller last looked, or is being rebuilt

local sale = redis.call('HMGET', KEYS[1], 'epoch', 'state', 'open_state', 'left', 'generation')
if not sale[1] then return 'unknown-sale' end
if sale[1] ~= ARGV[1] or ARGV[1] == '0' then return 'stale-epoch' end
if sale[3] ~= 'offers' or sale[4] == '0' then return 'unchanged' end

redis.call('HSET', KEYS[1], 'state', sale[2] == 'offers' and 'waitlist' or sale[2], 'open_state', 'waitlist',
  'generation', string.format('%d', sale[5] + 1))
return 'reopened'
