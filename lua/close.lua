#!lua flags=allow-oom
-- Closes a sale for a rebuild: with epoch 0 it is stale for everybody who sells, releases or changes
-- it. It works on whatever is there, also on nothing: a sale that Redis lost is closed as well, so
-- that nobody takes it for one that does not exist.
--
-- KEYS
--   1  sale  hash, as in reserve.lua
-- Answers
--   {sequence, epoch}: the last place that the sale gave away, and the epoch that it was in, as far as Redis
--   knows: 0 for what is lost.

local kind = redis.call('TYPE', KEYS[1]).ok
if kind ~= 'hash' and kind ~= 'none' then redis.call('DEL', KEYS[1]) end

local sale = redis.call('HMGET', KEYS[1], 'sequence', 'epoch', 'closed_epoch')

-- What is longer than that was forged, and nothing goes on from it.
local function number(text, digits)
  return text and #text <= digits and string.find(text, '^%d+$') and text or '0'
end

local sequence, epoch = number(sale[1], 15), number(sale[2], 9)
if epoch == '0' then epoch = number(sale[3], 9) end -- it was closed before
redis.call('HSET', KEYS[1], 'epoch', '0', 'sequence', sequence, 'closed_epoch', epoch)
-- A caller that takes epoch 0 for one to sell in finds nothing to sell from.
redis.call('HDEL', KEYS[1], 'left', 'stock')
return { tonumber(sequence), tonumber(epoch) }
