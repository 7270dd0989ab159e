-- Appends lost events of reservations again. A duplicate event does no harm: recording is
-- idempotent by order id.
--
-- Only current reservations get an event, which is built from the reservation: nothing is appended
-- that was not accepted.
--
-- KEYS
--   1  buyers  hash, as in reserve.lua
--   2  orders  stream of events, as in reserve.lua
-- ARGV
--   1  metadata  of the event, as in reserve.lua
--   2  user      of the first order
--   3  order_id  of the first order, as in buyers
--   4  payload   of its event
--   and so on: three values for every further order
-- Answers
--   {answer, answer, ...}, one for each order, in the order given
--   appended  the event is in the stream
--   not-held  the user holds no reservation of this order: nothing was done
--   damaged   what the user holds cannot be read: nothing was done

local per_order, before = 3, 1
local orders = (#ARGV - before) / per_order
if orders < 1 or orders ~= math.floor(orders) then
  return redis.error_reply('ERR append takes metadata and three values for each order')
end

local answers = {}
for i = 1, orders do
  local at = before + (i - 1) * per_order
  local user, order_id, payload = ARGV[at + 1], ARGV[at + 2], ARGV[at + 3]
  local reservation = redis.call('HGET', KEYS[1], user)
  local its_order, sequence, reserved_at, key = string.match(reservation or '', '^(%S+) %d+ (%d+) (%x+)%f[%z:@]:?([%w_-]*)@?%d*%f[%z:@]$')
  if reservation and not its_order then
    answers[i] = 'damaged'
  elseif its_order == order_id then
    local event = {
      '_watermill_message_uuid', order_id, 'metadata', ARGV[1], 'payload', payload,
      'reserved_at_ms', string.format('%d', tonumber(reserved_at, 16)), 'sequence', sequence,
    }
    if key ~= '' then event[11], event[12] = 'key', key end
    redis.call('XADD', KEYS[2], '*', unpack(event))
    answers[i] = 'appended'
  else
    answers[i] = 'not-held'
  end
end
return answers
