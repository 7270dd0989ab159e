-- Deletes the consumers of a group that have no pending entries and have not been heard of for long:
-- those whose process is gone for good and whose entries others have claimed.
--
-- In one step because XGROUP DELCONSUMER throws away whatever the consumer has pending: between a
-- look at it and its deletion it could have been given an entry, which nobody would ever see again.
--
-- KEYS
--   1  stream
-- ARGV
--   1  group
--   2  consumer     that asks, and is spared
--   3  idle_max_ms  how long a consumer may be silent
-- Answers
--   {consumer, consumer, ...}, the names of those deleted; none if there is no such stream or group

if redis.call('EXISTS', KEYS[1]) == 0 then return {} end

local consumers = redis.pcall('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])
if consumers.err then
  if string.find(consumers.err, 'NOGROUP', 1, true) then return {} end
  return consumers
end

local deleted = {}
for _, flat in ipairs(consumers) do
  local consumer = {}
  for i = 1, #flat, 2 do consumer[flat[i]] = flat[i + 1] end
  if consumer.name ~= ARGV[2] and consumer.pending == 0 and consumer.idle >= tonumber(ARGV[3]) then
    redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], consumer.name)
    deleted[#deleted + 1] = consumer.name
  end
end
return deleted
