-- Returns what a shard of a sale has, for a caller that compares all shards.
--
-- KEYS
--   1  sale  hash of the shard, as in give.lua
-- ARGV
--   1  epoch   of the sale's stock that the caller expects
--   2  shards  how many the sale has
--   3  items   letters of its items; left out in a sale without items
-- Answers
--   {answer, left, generation, quiet, given, got, given, got, ...}: a word, and with counted the fields
--   of one moment, the last two for each shard in their order. quiet is 1 if the units left have just
--   returned and may not be sold yet (see reserve.lua), 2 if they are offered to those who wait, and otherwise 0.
--   With items, left and quiet of each item, in their order, come before given and got; left is empty if it is missing.
--   counted       the fields follow
--   unknown-sale  there is no such sale
--   stale-epoch   the sale's stock was rebuilt since the caller last looked, or is being rebuilt

local names = { 'epoch', 'left', 'generation', 'quiet_since_ms', 'open_state' }
for shard = 0, ARGV[2] - 1 do
  names[#names + 1], names[#names + 2] = 'given:' .. shard, 'got:' .. shard
end
local moves_end = #names
for letter in string.gmatch(ARGV[3] or '', '%a') do
  names[#names + 1], names[#names + 2] = 'left.' .. letter, 'quiet.' .. letter
end
local sale = redis.call('HMGET', KEYS[1], unpack(names))
if not sale[1] then return { 'unknown-sale' } end
if sale[1] ~= ARGV[1] or ARGV[1] == '0' then return { 'stale-epoch' } end

local quiet_ms = 1000 -- as in reserve.lua
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local function quiet(since)
  if sale[5] == 'offers' or since and string.sub(since, 1, 6) == 'offers' then return '2' end
  return since and now_ms - since < quiet_ms and '1' or '0'
end

local answer = { 'counted', sale[2], sale[3], quiet(sale[4]) }
for i = moves_end + 1, #names, 2 do
  answer[#answer + 1], answer[#answer + 2] = sale[i] or '', quiet(sale[i + 1])
end
for i = 6, moves_end do answer[#answer + 1] = sale[i] or '0' end
return answer
