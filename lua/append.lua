-- Appends lost orders to the stream again, in one entry. A duplicate does no harm: recording is
-- idempotent by order id.
--
-- Only current reservations are appended, as they stand: nothing is appended that was not accepted.
--
-- KEYS
--   1  buyers  hash, as in reserve.lua
--   2  orders  stream of messages, as in reserve.lua
-- ARGV
--   1  metadata  of the message, as in reserve.lua
--   2  user      of the first order
--   3  order_id  of the first order, as in buyers
--   and so on: two values for every further order
-- Answers
--   {answer, answer, ...}, one for each order, in the order given
--   appended  the order is in the stream
--   not-held  the user holds no reservation of this order: nothing was done
--   damaged   what the user holds cannot be read: nothing was done

-- As in reserve.lua.
local letters = 'abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ'
local lines_of = function(text)
  local lines, sum, last, size = {}, 0, 0, 0
  for letter, units in string.gmatch(text, '(%a)([1-9]%d*)') do
    local place = string.find(letters, letter, 1, true) or 0
    if place <= last or #units > 7 then return nil end
    lines[#lines + 1], sum, last, size = { letter = letter, units = tonumber(units) }, sum + units, place, size + 1 + #units
  end
  if size > 0 and size == #text then return lines, sum end
end

local per_order, before = 2, 1
local orders = (#ARGV - before) / per_order
if orders < 1 or orders ~= math.floor(orders) then
  return redis.error_reply('ERR append takes metadata and two values for each order')
end

local answers, reservations, first_order = {}, {}, nil
for i = 1, orders do
  local user, order_id = ARGV[before + 2 * i - 1], ARGV[before + 2 * i]
  local reservation = redis.call('HGET', KEYS[1], user)
  local its_order, units = string.match(reservation or '', '^(%S+) (%w+) %d+ %x+%f[%z:@]:?[%w_-]*@?%d*%f[%z:@]$')
  if reservation and not (its_order and (string.find(units, '^%d+$') or lines_of(units))) then
    answers[i] = 'damaged'
  elseif its_order == order_id then
    first_order = first_order or order_id
    reservations[#reservations + 1] = user
    reservations[#reservations + 1] = reservation
    answers[i] = 'appended'
  else
    answers[i] = 'not-held'
  end
end
if first_order then
  local count = string.format('%d', #reservations / 2)
  redis.call('XADD', KEYS[2], '*', '_watermill_message_uuid', first_order,
    'metadata', ARGV[1] .. string.char(0xa0 + #count) .. count, 'payload', table.concat(reservations, '\n'))
end
return answers
