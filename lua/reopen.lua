-- Sells the units of a sale with a waiting list to everybody again, because nobody waits for them: until units return when
-- none are left, or, if the list is closed, for good.
--
-- KEYS
--   1  sale  hash, as in reserve.lua
-- ARGV
--   1  epoch       of the sale's stock that the caller expects
--   2  open_state  waitlist, or open if the list is closed
-- Answers
--   reopened      the sale has this open state
--   unchanged     it had it before, or nothing is left and it has to be waitlist
--   unknown-sale  there is no such sale
--   stale-epoch   the sale's stock was rebuilt since the caller last looked, or is being rebuilt

local sale = redis.call('HMGET', KEYS[1], 'epoch', 'state', 'open_state', 'left', 'generation')
if not sale[1] then return 'unknown-sale' end
if sale[1] ~= ARGV[1] or ARGV[1] == '0' then return 'stale-epoch' end
if sale[3] == ARGV[2] or ARGV[2] == 'waitlist' and (sale[3] ~= 'offers' or sale[4] == '0') then return 'unchanged' end

redis.call('HSET', KEYS[1], 'state', sale[2] == sale[3] and ARGV[2] or sale[2], 'open_state', ARGV[2],
  'generation', string.format('%d', sale[5] + 1))
return 'reopened'
