-- Adds units to the stock of a sale, or removes some that are left. Taken units stay taken.
--
-- Changes of a sale are applied in the order of their revisions, each exactly once, and a change
-- that comes too early is not applied before its predecessors. A repeat changes nothing and returns
-- the first answer until the stock changes again, so that a caller that lost the answer learns how
-- many units were removed.
--
-- Units added to a sale with none left are sold a second later (see reserve.lua), or offered as those that return
-- (release.lua).
--
-- Only this script knows how many units are left, so only it can refuse a lower stock. A refusal
-- still applies the revision, so that later changes do not wait for it. Of several shards each removes
-- what it has left; if that is too little in all, put_back.lua puts it back.
--
-- KEYS
--   1  sale  hash, as in reserve.lua; its field restocked: "<epoch> <revision> <answer>" of the last
--           change of the stock
-- ARGV
--   1  epoch     of the sale's stock that the caller expects
--   2  revision  that this change makes of the sale's definition
--   3  units     to be added, or below zero to be removed
--   4  least     how many must be removed; if fewer are left, none are
-- Answers
--   restocked <units>   so many were added, or removed if it is below zero, by this change
--   unchanged           the sale has this revision, or a later one
--   gap <revision>      the sale has this revision; those between are not applied yet
--   taken <units>       fewer are left than must be removed, because so many are taken: the revision is applied
--   unknown-sale        there is no such sale
--   stale-epoch         the sale's stock was rebuilt since the caller last looked

local sale = redis.call('HMGET', KEYS[1], 'epoch', 'revision', 'stock', 'left', 'restocked', 'generation', 'state', 'open_state')
if not sale[1] then return 'unknown-sale' end
if sale[1] ~= ARGV[1] then return 'stale-epoch' end
local this = ARGV[1] .. ' ' .. ARGV[2] .. ' '
if sale[5] and string.sub(sale[5], 1, #this) == this then return string.sub(sale[5], #this + 1) end
if tonumber(ARGV[2]) <= tonumber(sale[2]) then return 'unchanged' end
if tonumber(ARGV[2]) > sale[2] + 1 then return 'gap ' .. sale[2] end
if not (string.find(ARGV[3], '^-?%d+$') and string.find(ARGV[4], '^%d+$')) then return redis.error_reply('ERR units must be whole numbers') end

local left = tonumber(sale[4])
local units = math.max(tonumber(ARGV[3]), -left)
if math.max(0, -units) < tonumber(ARGV[4]) then
  local answer = string.format('taken %d', sale[3] - left)
  redis.call('HSET', KEYS[1], 'revision', ARGV[2], 'restocked', this .. answer)
  return answer
end

local answer = string.format('restocked %d', units)
local changes = {
  'stock', string.format('%d', sale[3] + units), 'left', string.format('%d', left + units), 'revision', ARGV[2],
  'restocked', this .. answer, 'generation', string.format('%d', sale[6] + 1),
}
if left == 0 and units > 0 then -- ingresses may remember the sale as sold out (reserve.lua)
  local time = redis.call('TIME')
  changes[11], changes[12] = 'quiet_since_ms', string.format('%d', time[1] * 1000 + math.floor(time[2] / 1000))
  if sale[8] == 'waitlist' then
    changes[13], changes[14], changes[15], changes[16] = 'open_state', 'offers', 'state', sale[7] == 'waitlist' and 'offers' or sale[7]
  end
end
redis.call('HSET', KEYS[1], unpack(changes))
return answer
