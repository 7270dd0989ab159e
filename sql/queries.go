package sql

import _ "embed"

// The queries of sql/queries, one file each, which tells its parameters and its answer.
var (
	//go:embed queries/add_sold.sql
	AddSold string
	//go:embed queries/change_sale.sql
	ChangeSale string
	//go:embed queries/find_dead_letter.sql
	FindDeadLetter string
	//go:embed queries/find_orders.sql
	FindOrders string
	//go:embed queries/find_sale_change.sql
	FindSaleChange string
	//go:embed queries/find_sales.sql
	FindSales string
	//go:embed queries/insert_sale.sql
	InsertSale string
	//go:embed queries/list_dead_letters.sql
	ListDeadLetters string
	//go:embed queries/lock_sale.sql
	LockSale string
	//go:embed queries/mark_discarded.sql
	MarkDiscarded string
	//go:embed queries/mark_published.sql
	MarkPublished string
	//go:embed queries/mark_replayed.sql
	MarkReplayed string
	//go:embed queries/most_partitions.sql
	MostPartitions string
	//go:embed queries/park_dead_letter.sql
	ParkDeadLetter string
	//go:embed queries/record_orders.sql
	RecordOrders string
	//go:embed queries/sale_changes.sql
	SaleChanges string
	//go:embed queries/unpublished_sales.sql
	UnpublishedSales string
)
