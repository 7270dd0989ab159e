-- Adds a shard of a sale to Redis, once. It never overwrites: an existing one keeps its stock, and
-- buyers without a sale mean lost data that only a rebuild from Postgres can restore.
--
-- KEYS
--   1  sale    hash, as in reserve.lua
--   2  buyers  hash, as in reserve.lua
--   3  sales   set of the ids of the sales in this partition
-- ARGV
--   1  sale_id           as it goes into the set
--   2  epoch             of the sale's stock
--   3  revision          of the sale's definition
--   4  stock             units of the shard
--   5  per_order_limit   units that one order may hold
--   6  opens_at_ms       0 for immediately
--   7  closes_at_ms      0 for never
--   8  payment_window_s  0 where a confirmed order is final
--   9  sequence          of a shard without orders
--   10  shard             as in reserve.lua; empty for a sale with one shard
--   11  items             as in reserve.lua; left out, with all that follow, in a sale without items
--   12  limit             of an order of items; per_order_limit is 0 then
--   13  item_stock        units of the first item in the shard
--   14  item_limit        units of the first item that one order may hold, or 0
--   and so on: two values for every further item
-- Answers
--   opened           the sale is added
--   unchanged        it existed before
--   stale-epoch      it exists in another epoch
--   buyers-remain    the sale is missing but its buyers exist: nothing was done

local epoch = redis.call('HGET', KEYS[1], 'epoch')
if epoch then return epoch == ARGV[2] and 'unchanged' or 'stale-epoch' end
if redis.call('EXISTS', KEYS[2]) == 1 then return 'buyers-remain' end

for i = 2, #ARGV do
  if i ~= 10 and i ~= 11 and not string.find(ARGV[i], '^%d+$') then return redis.error_reply('ERR argument ' .. i .. ' must be a whole number') end
end

if not redis.acl_check_cmd('HSET', KEYS[1], 'epoch', ARGV[2]) then
  return redis.error_reply('NOPERM the sale was not opened: this user of Redis must be allowed HSET of ' .. KEYS[1])
end
redis.call('SADD', KEYS[3], ARGV[1])
redis.call('HSET', KEYS[1], 'epoch', ARGV[2], 'revision', ARGV[3], 'stock', ARGV[4], 'left', ARGV[4],
  'per_order_limit', ARGV[5], 'opens_at_ms', ARGV[6], 'closes_at_ms', ARGV[7], 'payment_window_s', ARGV[8],
  'state', 'open', 'sequence', ARGV[9], 'generation', '1')
if ARGV[10] ~= '' then redis.call('HSET', KEYS[1], 'shard', ARGV[10]) end
if ARGV[11] then
  local letters = 'abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ'
  redis.call('HSET', KEYS[1], 'items', ARGV[11], 'limit', ARGV[12])
  for i = 13, #ARGV, 2 do
    local place = (i - 11) / 2
    local letter = string.sub(letters, place, place)
    redis.call('HSET', KEYS[1], 'stock.' .. letter, ARGV[i], 'left.' .. letter, ARGV[i])
    if ARGV[i + 1] ~= '0' then redis.call('HSET', KEYS[1], 'limit.' .. letter, ARGV[i + 1]) end
  end
end
return 'opened'
