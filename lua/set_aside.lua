-- Renames a key that holds another type than it should, so that its content can be rebuilt. The old
-- content stays for inspection.
--
-- KEYS
--   1  key    to be set aside
--   2  aside  its new name
-- ARGV
--   1  type  that the key should have, as TYPE returns it
-- Answers
--   set-aside  the key is free
--   unchanged  the key has this type, or does not exist
--   taken      a key with the new name exists: nothing was done

local kind = redis.call('TYPE', KEYS[1]).ok
if kind == ARGV[1] or kind == 'none' then return 'unchanged' end
if redis.call('RENAMENX', KEYS[1], KEYS[2]) == 0 then return 'taken' end
return 'set-aside'
