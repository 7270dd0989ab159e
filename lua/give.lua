-- Gives units of one shard of a sale to another one (take.lua). What was given to a shard is a total
-- that only grows in an epoch, and the caller names the total that it knows. So a call that is
-- repeated or late gives nothing: it only tells the total.
--
-- In a sale with items the totals are of each item, and a call gives units of several. A total is then written as lines
-- are, as in a12c3, and is 0 before the first unit.
--
-- Units that have just returned are not given: they may not be sold yet (see reserve.lua). Units that are offered to those
-- who wait are given only by the worker that offers them, after the other shard offers, too (waitlist.lua).
--
-- KEYS
--   1  sale  hash of the shard that gives, as in reserve.lua, with two fields for each other shard:
--            given:<shard>, the total given to it in this epoch, and got:<shard>, that got from it
-- ARGV
--   1  epoch  of the sale's stock that the caller expects
--   2  to     number of the shard that is to get them
--   3  known  total given to it, as the caller has read
--   4  parts  into how many parts the units left are divided; one of them, rounded up, is given
--   5  whose  offered for units that are offered, or sold for those that are for everybody
--   6  items  letters of the items that units are wanted of; left out in a sale without items
-- Answers
--   given <total>  given to that shard, with the units of this call
--   told <total>   given to that shard; nothing by this call, because the total was another one or no such units are left
--   unknown-sale   there is no such sale
--   stale-epoch    the sale's stock was rebuilt since the caller last looked, or is being rebuilt

local field = 'given:' .. ARGV[2]
local sale = redis.call('HMGET', KEYS[1], 'epoch', 'left', 'stock', 'quiet_since_ms', field, 'open_state')
if not sale[1] then return 'unknown-sale' end
if sale[1] ~= ARGV[1] or ARGV[1] == '0' then return 'stale-epoch' end
if not string.find(ARGV[4], '^[1-9]%d*$') then return redis.error_reply('ERR parts must be a whole number above zero') end

local total = sale[5] or '0'
if total ~= ARGV[3] then return 'told ' .. total end
local quiet_ms = 1000 -- as in reserve.lua
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)

-- What is given of so many units, which returned at that time, or after "offers " are offered.
local function part(left, since)
  local offered = sale[6] == 'offers' or since and string.sub(since, 1, 6) == 'offers'
  local quiet = since and not offered and now_ms - since < quiet_ms
  if left == 0 or quiet or (offered and 'offered' or 'sold') ~= ARGV[5] then return 0 end
  return math.ceil(left / ARGV[4])
end

local units, changes = 0, {}
if not ARGV[6] then
  units = part(tonumber(sale[2]), sale[4])
  total = string.format('%d', total + units)
else
  local totals = {}
  for letter, given in string.gmatch(total, '(%a)(%d+)') do totals[letter] = tonumber(given) end
  for letter in string.gmatch(ARGV[6], '%a') do
    local item = redis.call('HMGET', KEYS[1], 'left.' .. letter, 'stock.' .. letter, 'quiet.' .. letter)
    local given = item[1] and part(tonumber(item[1]), item[3]) or 0
    if given > 0 then
      units, totals[letter] = units + given, (totals[letter] or 0) + given
      changes[#changes + 1], changes[#changes + 2] = 'left.' .. letter, string.format('%d', item[1] - given)
      changes[#changes + 1], changes[#changes + 2] = 'stock.' .. letter, string.format('%d', item[2] - given)
    end
  end
  local letters = 'abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ'
  total = string.gsub(letters, '%a', function(letter) return totals[letter] and letter .. string.format('%d', totals[letter]) or '' end)
end
if units == 0 then return 'told ' .. (sale[5] or '0') end

redis.call('HSET', KEYS[1], 'left', string.format('%d', sale[2] - units), 'stock', string.format('%d', sale[3] - units), field, total,
  unpack(changes))
return 'given ' .. total
