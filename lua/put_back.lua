-- Puts back the units that a shard of a sale has removed from its stock (restock.lua), because all
-- shards together had too few left. A repeat puts back nothing.
--
-- KEYS
--   1  sale  hash, as in restock.lua
-- ARGV
--   1  epoch     of the sale's stock that the caller expects
--   2  revision  of the change that removed the units
-- Answers
--   put-back      the units are for sale again; if none were left, a second later (see reserve.lua)
--   unchanged     that change removed nothing here, or its units are back
--   unknown-sale  there is no such sale
--   stale-epoch   the sale's stock was rebuilt since the caller last looked

local sale = redis.call('HMGET', KEYS[1], 'epoch', 'stock', 'left', 'restocked', 'generation')
if not sale[1] then return 'unknown-sale' end
if sale[1] ~= ARGV[1] then return 'stale-epoch' end
local epoch, revision, removed = string.match(sale[4] or '', '^(%d+) (%d+) restocked %-(%d+)$')
if epoch ~= ARGV[1] or revision ~= ARGV[2] then return 'unchanged' end

local changes = {
  'stock', string.format('%d', sale[2] + removed), 'left', string.format('%d', sale[3] + removed),
  'restocked', string.format('%s %s restocked 0', epoch, revision), 'generation', string.format('%d', sale[5] + 1),
}
if tonumber(sale[3]) == 0 then
  local time = redis.call('TIME')
  changes[9], changes[10] = 'quiet_since_ms', string.format('%d', time[1] * 1000 + math.floor(time[2] / 1000))
end
redis.call('HSET', KEYS[1], unpack(changes))
return 'put-back'
