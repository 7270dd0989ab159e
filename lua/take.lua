-- Takes the units that other shards of a sale have given to this one (give.lua). What was got from a
-- shard is a total that only grows in an epoch, so a call that is repeated or late takes nothing.
--
-- A shard that units have just returned to is quiet (see reserve.lua). The units that come now are not: while they were
-- in another shard or on their way, no ingress could learn that the sale is sold out. So they end the pause, or the
-- users of this shard would hear that nothing is left while it has them. Units that are offered have returned a moment ago,
-- in another shard, and do not.
--
-- KEYS
--   1  sale  hash of the shard that takes, as in give.lua
-- ARGV
--   1  epoch  of the sale's stock that the caller expects
--   2  from   number of the first shard
--   3  total  that it has given to this one in this epoch, as in give.lua
--   and so on: two values for every further shard
-- Answers
--   taken         units that were on their way are here
--   unchanged     all of them had been taken before, or the sale is retired (retire.lua): it sells nothing more
--   unknown-sale  there is no such sale
--   stale-epoch   the sale's stock was rebuilt since the caller last looked, or is being rebuilt

local givers = (#ARGV - 1) / 2
if givers < 1 or givers ~= math.floor(givers) then return redis.error_reply('ERR take takes an epoch and two values for each shard') end
local sale = redis.call('HMGET', KEYS[1], 'epoch', 'left', 'stock', 'quiet_since_ms', 'state', 'open_state')
if not sale[1] then return 'unknown-sale' end
if sale[1] ~= ARGV[1] or ARGV[1] == '0' then return 'stale-epoch' end
if sale[5] == 'retired' then return 'unchanged' end

-- A total by the letters of the items; a sale without items has one, of the empty letter.
local function read(total)
  local totals = {}
  for letter, units in string.gmatch(total, '(%a?)(%d+)') do totals[letter] = tonumber(units) end
  return totals
end

local letters = 'abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ'
local function write(totals)
  if totals[''] then return string.format('%d', totals['']) end
  return (string.gsub(letters, '%a', function(letter) return totals[letter] and letter .. string.format('%d', totals[letter]) or '' end))
end

local units, came, changes = 0, {}, {}
for i = 1, givers do
  local field = 'got:' .. ARGV[2 * i]
  local got, more = read(redis.call('HGET', KEYS[1], field) or ''), 0
  for letter, total in pairs(read(ARGV[2 * i + 1])) do
    local missing = total - (got[letter] or 0)
    if missing > 0 then
      more, got[letter], came[letter] = more + missing, total, (came[letter] or 0) + missing
    end
  end
  if more > 0 then
    units = units + more
    changes[#changes + 1], changes[#changes + 2] = field, write(got)
  end
end
if units == 0 then return 'unchanged' end
changes[#changes + 1], changes[#changes + 2] = 'left', string.format('%d', sale[2] + units)
changes[#changes + 1], changes[#changes + 2] = 'stock', string.format('%d', sale[3] + units)
if came[''] then
  if sale[4] and sale[6] ~= 'offers' then changes[#changes + 1], changes[#changes + 2] = 'quiet_since_ms', '0' end
else
  for letter, its_units in pairs(came) do
    local item = redis.call('HMGET', KEYS[1], 'left.' .. letter, 'stock.' .. letter, 'quiet.' .. letter)
    changes[#changes + 1], changes[#changes + 2] = 'left.' .. letter, string.format('%d', item[1] + its_units)
    changes[#changes + 1], changes[#changes + 2] = 'stock.' .. letter, string.format('%d', item[2] + its_units)
    if item[3] and string.sub(item[3], 1, 6) ~= 'offers' then changes[#changes + 1], changes[#changes + 2] = 'quiet.' .. letter, '0' end
  end
end
redis.call('HSET', KEYS[1], unpack(changes))
return 'taken'
