-- Gives units of one shard of a sale to another one (take.lua). What was given to a shard is a total
-- that only grows in an epoch, and the caller names the total that it knows. So a call that is
-- repeated or late gives nothing: it only tells the total.
--
-- Units that have just returned are not given: they may not be sold yet (see reserve.lua). Units that are offered to those
-- who wait are given only by the worker that offers them, after the other shard offers, too (waitlist.lua).
--
-- KEYS
--   1  sale  hash of the shard that gives, as in reserve.lua, with two fields for each other shard:
--            given:<shard>, the units given to it in this epoch, and got:<shard>, those got from it
-- ARGV
--   1  epoch  of the sale's stock that the caller expects
--   2  to     number of the shard that is to get them
--   3  known  units given to it, as the caller has read
--   4  parts  into how many parts the units left are divided; one of them, rounded up, is given
--   5  whose  offered for units that are offered, or sold for those that are for everybody
-- Answers
--   given <total>  units given to that shard, with those of this call
--   told <total>   units given to that shard; none by this call, because the total was another one or no such units are left
--   unknown-sale   there is no such sale
--   stale-epoch    the sale's stock was rebuilt since the caller last looked, or is being rebuilt

local field = 'given:' .. ARGV[2]
local sale = redis.call('HMGET', KEYS[1], 'epoch', 'left', 'stock', 'quiet_since_ms', field, 'open_state')
if not sale[1] then return 'unknown-sale' end
if sale[1] ~= ARGV[1] or ARGV[1] == '0' then return 'stale-epoch' end
if not string.find(ARGV[4], '^[1-9]%d*$') then return redis.error_reply('ERR parts must be a whole number above zero') end

local left, total = tonumber(sale[2]), sale[5] or '0'
local quiet_ms = 1000 -- as in reserve.lua
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local whose, quiet = 'sold', sale[4] and now_ms - sale[4] < quiet_ms
if sale[6] == 'offers' then whose, quiet = 'offered', false end
if total ~= ARGV[3] or left == 0 or quiet or whose ~= ARGV[5] then return 'told ' .. total end

local units = math.ceil(left / ARGV[4])
total = string.format('%d', total + units)
redis.call('HSET', KEYS[1], 'left', string.format('%d', left - units), 'stock', string.format('%d', sale[3] - units), field, total)
return 'given ' .. total
