-- Notes that all offers of the draw of the sale $1 are made again that were lost before its epoch $2.
UPDATE draws SET offers_epoch = $2 WHERE sale_id = $1
