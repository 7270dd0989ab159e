-- Keeps pending entries assigned to a consumer that still works on them: resets their idle time and
-- raises their delivery counts to those of deliveries that happened without Redis.
--
-- XCLAIM alone would take an entry back from a consumer that has claimed it meanwhile, so the owner
-- is checked first, in the same step. A count is never lowered, so a repeat changes nothing.
--
-- KEYS
--   1  stream
-- ARGV
--   1  group
--   2  consumer    that works on the entries
--   3  entry_id    of the first entry
--   4  deliveries  that the first entry has had, or 0 to leave the count as it is
--   and so on: two values for every further entry
-- Answers
--   {answer, answer, ...}, one for each entry, in the order given
--   kept   it is assigned to the consumer, and its idle time starts again
--   taken  another consumer has claimed it: nothing was done
--   gone   it is not pending: acknowledged, or deleted from the stream

local entries = (#ARGV - 2) / 2
if entries < 1 or entries ~= math.floor(entries) then
  return redis.error_reply('ERR keep takes a group, a consumer and two values for each entry')
end

local answers = {}
for i = 1, entries do
  local id, deliveries = ARGV[2 * i + 1], ARGV[2 * i + 2]
  local pending = redis.call('XPENDING', KEYS[1], ARGV[1], id, id, 1)[1]
  if not pending then
    answers[i] = 'gone'
  elseif pending[2] ~= ARGV[2] then
    answers[i] = 'taken'
  else
    local count = math.max(pending[4], tonumber(deliveries))
    local claimed = redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, id, 'RETRYCOUNT', count, 'JUSTID')
    -- XCLAIM itself drops an entry from the pending list if the stream has lost it.
    answers[i] = #claimed == 1 and 'kept' or 'gone'
  end
end
return answers
