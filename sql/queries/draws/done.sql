-- Notes that no unit of the sale $1 can be offered now, unless it was noted again after $2.
DELETE FROM offers_due WHERE sale_id = $1 AND turn = $2
