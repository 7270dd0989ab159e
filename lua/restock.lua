-- Sets the total stock of a sale. Taken units stay taken; the rest is left for sale.
--
-- Changes of a sale are applied in the order of their revisions, each exactly once, and a change
-- that comes too early is not applied before its predecessors. The new stock is a total, not a
-- difference. A repeat changes nothing and returns the first answer until the stock changes again,
-- so that a caller that lost the answer learns whether the stock was lowered.
--
-- Units added to a sale with none left are sold a second later (see reserve.lua).
--
-- Only this script knows how many units are taken, so only it can refuse a lower stock. A refusal
-- still applies the revision, so that later changes do not wait for it.
--
-- KEYS
--   1  sale  hash, as in reserve.lua; its field restocked: "<epoch> <revision>" of the last change of
--           the stock, followed by " <units>" if it was refused because so many are taken
-- ARGV
--   1  epoch     of the sale's stock that the caller expects
--   2  revision  that this change makes of the sale's definition
--   3  stock     units for sale in all
-- Answers
--   restocked           the stock is as given, by this change
--   unchanged           the sale has this revision, or a later one
--   gap <revision>      the sale has this revision; those between are not applied yet
--   taken <units>       more units than the new stock are taken: the stock stays, the revision is applied
--   unknown-sale        there is no such sale
--   stale-epoch         the sale's stock was rebuilt since the caller last looked

local sale = redis.call('HMGET', KEYS[1], 'epoch', 'revision', 'stock', 'left', 'restocked', 'generation')
if not sale[1] then return 'unknown-sale' end
if sale[1] ~= ARGV[1] then return 'stale-epoch' end
local this = ARGV[1] .. ' ' .. ARGV[2]
if sale[5] == this then return 'restocked' end
if sale[5] and string.sub(sale[5], 1, #this + 1) == this .. ' ' then return 'taken' .. string.sub(sale[5], #this + 1) end
if tonumber(ARGV[2]) <= tonumber(sale[2]) then return 'unchanged' end
if tonumber(ARGV[2]) > sale[2] + 1 then return 'gap ' .. sale[2] end
if not string.find(ARGV[3], '^%d+$') then return redis.error_reply('ERR stock must be a whole number') end

local taken = sale[3] - sale[4]
if tonumber(ARGV[3]) < taken then
  redis.call('HSET', KEYS[1], 'revision', ARGV[2], 'restocked', string.format('%s %d', this, taken))
  return string.format('taken %d', taken)
end

local changes = {
  'stock', ARGV[3], 'left', string.format('%d', ARGV[3] - taken), 'revision', ARGV[2], 'restocked', this,
  'generation', string.format('%d', sale[6] + 1),
}
if tonumber(sale[4]) == 0 then -- ingresses may remember the sale as sold out (reserve.lua)
  local time = redis.call('TIME')
  changes[11], changes[12] = 'quiet_since_ms', string.format('%d', time[1] * 1000 + math.floor(time[2] / 1000))
end
redis.call('HSET', KEYS[1], unpack(changes))
return 'restocked'
