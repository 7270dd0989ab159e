-- Puts back the units that a shard of a sale has removed from its stock (restock.lua), or from that of its items
-- (restock_items.lua), because all shards together had too few left. A repeat puts back nothing.
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

local sale = redis.call('HMGET', KEYS[1], 'epoch', 'stock', 'left', 'restocked', 'generation', 'open_state')
if not sale[1] then return 'unknown-sale' end
if sale[1] ~= ARGV[1] then return 'stale-epoch' end
local epoch, revision, removed = string.match(sale[4] or '', '^(%d+) (%d+) restocked (%S+)$')
if epoch ~= ARGV[1] or revision ~= ARGV[2] then return 'unchanged' end

local time = redis.call('TIME')
local now = string.format('%d', time[1] * 1000 + math.floor(time[2] / 1000))
local sum, changes = 0, {}
for letter, units in string.gmatch(removed, '(%a?)%-(%d+)') do -- without a letter in a sale without items
  sum = sum + units
  if letter ~= '' then
    local item = redis.call('HMGET', KEYS[1], 'stock.' .. letter, 'left.' .. letter)
    changes[#changes + 1], changes[#changes + 2] = 'stock.' .. letter, string.format('%d', item[1] + units)
    changes[#changes + 1], changes[#changes + 2] = 'left.' .. letter, string.format('%d', item[2] + units)
    if item[2] == '0' then -- as in restock_items.lua
      changes[#changes + 1], changes[#changes + 2] = 'quiet.' .. letter, (sale[6] == 'waitlist' and 'offers ' or '') .. now
    end
  elseif tonumber(sale[3]) == 0 then
    changes[#changes + 1], changes[#changes + 2] = 'quiet_since_ms', now
  end
end
if sum == 0 then return 'unchanged' end
redis.call('HSET', KEYS[1], 'stock', string.format('%d', sale[2] + sum), 'left', string.format('%d', sale[3] + sum),
  'restocked', string.format('%s %s restocked 0', epoch, revision), 'generation', string.format('%d', sale[5] + 1), unpack(changes))
return 'put-back'
