#!lua flags=allow-oom
-- Closes a sale for a rebuild: epoch 0 is stale for every caller that sells, releases or changes
-- it. A sale that Redis lost is closed as well, so that it is not taken for one that does not
-- exist.
--
-- Only the rebuild with this token can open the sale again, in an epoch above the highest known
-- (rebuilt.lua). A later close replaces the token.
--
-- KEYS
--   1  sale  hash, as in reserve.lua
-- ARGV
--   1  token  of the rebuild, unique to it
--   2  epoch  of the sale in Postgres, read before this
-- Answers
--   {sequence, epoch, token}: the last sequence that the sale assigned and its highest epoch, as far
--   as Redis or the caller knows them, or else 0; and the token of the rebuild that closed it before,
--   or an empty string.

local kind = redis.call('TYPE', KEYS[1]).ok
if kind ~= 'hash' and kind ~= 'none' then redis.call('DEL', KEYS[1]) end

local sale = redis.call('HMGET', KEYS[1], 'sequence', 'epoch', 'closed_epoch', 'rebuild', 'left', 'items')

-- Longer numbers are forged and are ignored.
local function number(text, digits)
  return text and #text <= digits and string.find(text, '^%d+$') and text or '0'
end

local sequence, epoch = number(sale[1], 15), number(sale[2], 9)
-- It may have been closed before.
for _, known in ipairs({ number(sale[3], 9), number(ARGV[2], 9) }) do
  if tonumber(known) > tonumber(epoch) then epoch = known end
end
-- Ingresses may remember the sale, or any of its items, as sold out (reserve.lua) while the rebuild returns units.
if sale[5] == '0' or sale[6] then
  local time = redis.call('TIME')
  redis.call('HSET', KEYS[1], 'quiet_since_ms', string.format('%d', time[1] * 1000 + math.floor(time[2] / 1000)))
end
redis.call('HSET', KEYS[1], 'epoch', '0', 'sequence', sequence, 'closed_epoch', epoch, 'rebuild', ARGV[1])
-- A caller that accepts epoch 0 finds no stock.
redis.call('HDEL', KEYS[1], 'left', 'stock')
return { tonumber(sequence), tonumber(epoch), sale[4] or '' }
