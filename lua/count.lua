-- Returns what a shard of a sale has, for a caller that compares all shards.
--
-- KEYS
--   1  sale  hash of the shard, as in give.lua
-- ARGV
--   1  epoch  of the sale's stock that the caller expects
-- Answers
--   {answer, field, value, field, value, ...}: a word, and with counted the fields left, generation,
--   quiet, and those of give.lua. quiet is 1 if the units left have just returned and may not be sold
--   yet (see reserve.lua), and otherwise 0.
--   counted       the fields are those of one moment
--   unknown-sale  there is no such sale
--   stale-epoch   the sale's stock was rebuilt since the caller last looked, or is being rebuilt

local fields = redis.call('HGETALL', KEYS[1])
local sale = {}
for i = 1, #fields, 2 do sale[fields[i]] = fields[i + 1] end
if not sale.epoch then return { 'unknown-sale' } end
if sale.epoch ~= ARGV[1] or ARGV[1] == '0' then return { 'stale-epoch' } end

local quiet_ms = 1000 -- as in reserve.lua
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local quiet = sale.quiet_since_ms and now_ms - sale.quiet_since_ms < quiet_ms
local answer = { 'counted', 'left', sale.left, 'generation', sale.generation, 'quiet', quiet and '1' or '0' }
for field, value in pairs(sale) do
  if string.find(field, '^given:%d+$') or string.find(field, '^got:%d+$') then
    answer[#answer + 1], answer[#answer + 2] = field, value
  end
end
return answer
