-- The last chunk of the draw of the sale $1, how many entries it has, and the id of the last one.
SELECT chunk, octet_length(ids) / 16 AS entries, encode(substring(ids FROM octet_length(ids) - 15), 'hex')::uuid AS last_id
FROM draw_chunks WHERE sale_id = $1 ORDER BY chunk DESC LIMIT 1
