#!lua flags=allow-oom
-- Closes a sale for a rebuild: with epoch 0 it is stale for everybody who sells, releases or changes
-- it. It works on whatever is there, also on nothing: a sale that Redis lost is closed as well, so
-- that nobody takes it for one that does not exist.
--
-- KEYS
--   1  sale  hash, as in reserve.lua
-- Answers
--   The last sequence that the sale gave away, as far as Redis knows: 0 if that is lost.

local kind = redis.call('TYPE', KEYS[1]).ok
if kind ~= 'hash' and kind ~= 'none' then redis.call('DEL', KEYS[1]) end

local sequence = redis.call('HGET', KEYS[1], 'sequence')
if not sequence or #sequence > 15 or not string.find(sequence, '^%d+$') then sequence = '0' end
redis.call('HSET', KEYS[1], 'epoch', '0', 'sequence', sequence)
return tonumber(sequence)
