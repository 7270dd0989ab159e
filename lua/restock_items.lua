-- Adds units to items of a sale, or removes some that are left, but of no item fewer than the caller needs. Taken units
-- stay taken. In all else it is as restock.lua.
--
-- KEYS
--   1  sale  hash, as in reserve.lua; its field restocked as in restock.lua
-- ARGV
--   1  epoch     of the sale's stock that the caller expects
--   2  revision  that this change makes of the sale's definition
--   3  letter    of the first item
--   4  units     to be added, or below zero to be removed
--   5  least     how many must be removed; if fewer are left, nothing is changed
--   and so on: three values for every further item
-- Answers
--   restocked <changes>  so many units of each item were added, or removed where it is below zero, by this change, as in a-3b1; or 0
--   unchanged            the sale has this revision, or a later one
--   gap <revision>       the sale has this revision; those between are not applied yet
--   taken <lines>        of these items fewer are left than must be removed, because so many are taken: the revision is applied
--   unknown-sale         there is no such sale
--   stale-epoch          the sale's stock was rebuilt since the caller last looked

local sale = redis.call('HMGET', KEYS[1], 'epoch', 'revision', 'stock', 'left', 'restocked', 'generation', 'open_state')
if not sale[1] then return 'unknown-sale' end
if sale[1] ~= ARGV[1] then return 'stale-epoch' end
local this = ARGV[1] .. ' ' .. ARGV[2] .. ' '
if sale[5] and string.sub(sale[5], 1, #this) == this then return string.sub(sale[5], #this + 1) end
if tonumber(ARGV[2]) <= tonumber(sale[2]) then return 'unchanged' end
if tonumber(ARGV[2]) > sale[2] + 1 then return 'gap ' .. sale[2] end

local time = redis.call('TIME')
local mark = (sale[7] == 'waitlist' and 'offers ' or '') .. string.format('%d', time[1] * 1000 + math.floor(time[2] / 1000))
local changes, changed, sum, taken, done = {}, {}, 0, '', ''
local function set(field, value)
  changes[#changes + 1], changes[#changes + 2] = field, value
end
for i = 3, #ARGV, 3 do
  local letter = ARGV[i]
  local item = redis.call('HMGET', KEYS[1], 'stock.' .. letter, 'left.' .. letter)
  local numbers = string.find(ARGV[i + 1] or '', '^-?%d+$') and string.find(ARGV[i + 2] or '', '^%d+$')
  if not (item[1] and numbers) or changed[letter] then
    return redis.error_reply('ERR restock takes a letter of the sale and two whole numbers for each item, once')
  end
  changed[letter] = true
  local left = tonumber(item[2])
  local units = math.max(tonumber(ARGV[i + 1]), -left)
  if math.max(0, -units) < tonumber(ARGV[i + 2]) then taken = taken .. string.format('%s%d', letter, item[1] - left) end
  set('stock.' .. letter, string.format('%d', item[1] + units))
  set('left.' .. letter, string.format('%d', left + units))
  -- Ingresses may remember the item as sold out (reserve.lua), and it may have a waiting list (release.lua).
  if left == 0 and units > 0 then set('quiet.' .. letter, mark) end
  sum, done = sum + units, done .. string.format('%s%d', letter, units)
end
if taken ~= '' then
  redis.call('HSET', KEYS[1], 'revision', ARGV[2], 'restocked', this .. 'taken ' .. taken)
  return 'taken ' .. taken
end
local answer = 'restocked ' .. (done == '' and '0' or done)
set('stock', string.format('%d', sale[3] + sum))
set('left', string.format('%d', sale[4] + sum))
set('revision', ARGV[2])
set('restocked', this .. answer)
set('generation', string.format('%d', sale[6] + 1))
redis.call('HSET', KEYS[1], unpack(changes))
return answer
