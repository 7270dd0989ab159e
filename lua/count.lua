-- Returns what a shard of a sale has, for a caller that compares all shards.
--
-- KEYS
--   1  sale  hash of the shard, as in give.lua
-- ARGV
--   1  epoch   of the sale's stock that the caller expects
--   2  shards  how many the sale has
-- Answers
--   {answer, left, generation, quiet, given, got, given, got, ...}: a word, and with counted the fields
--   of one moment, the last two for each shard in their order. quiet is 1 if the units left have just
--   returned and may not be sold yet (see reserve.lua), 2 if they are offered to those who wait, and otherwise 0.
--   counted       the fields follow
--   unknown-sale  there is no such sale
--   stale-epoch   the sale's stock was rebuilt since the caller last looked, or is being rebuilt

local names = { 'epoch', 'left', 'generation', 'quiet_since_ms', 'open_state' }
for shard = 0, ARGV[2] - 1 do
  names[#names + 1], names[#names + 2] = 'given:' .. shard, 'got:' .. shard
end
local sale = redis.call('HMGET', KEYS[1], unpack(names))
if not sale[1] then return { 'unknown-sale' } end
if sale[1] ~= ARGV[1] or ARGV[1] == '0' then return { 'stale-epoch' } end

local quiet_ms = 1000 -- as in reserve.lua
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local quiet = sale[5] == 'offers' and '2' or sale[4] and now_ms - sale[4] < quiet_ms and '1' or '0'
local answer = { 'counted', sale[2], sale[3], quiet }
for i = 6, #names do answer[i - 1] = sale[i] or '0' end
return answer
