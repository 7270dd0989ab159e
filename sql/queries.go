package sql

import (
	"embed"
	"strings"
)

// files has the queries, in a folder for each owner. A file's header gives its parameters and its result.
//
//go:embed queries
var files embed.FS

// names has the name of each query, by its text.
var names = map[string]string{}

// query returns the text of a file.
func query(name string) string {
	text, err := files.ReadFile("queries/" + name + ".sql")
	if err != nil {
		panic(err) // at the start of each program and test
	}
	names[string(text)] = name
	return string(text)
}

// NameOf names a statement for people: by its file ("ledger/record_fresh"), or else by its first word ("COMMIT").
func NameOf(statement string) string {
	if name, known := names[statement]; known {
		return name
	}
	word, _, _ := strings.Cut(strings.TrimSpace(statement), " ")
	return strings.TrimRight(word, ";")
}

// The queries. A variable is named after its folder and its file.
var (
	ArchiveAudit            = query("archive/audit")
	ArchiveBlockers         = query("archive/blockers")
	ArchiveColumns          = query("archive/columns")
	ArchiveDeleteRest       = query("archive/delete_rest")
	ArchiveDeleteSome       = query("archive/delete_some")
	ArchiveDueSales         = query("archive/due_sales")
	ArchiveEvents           = query("archive/events")
	ArchiveFigures          = query("archive/figures")
	ArchiveInsertEvents     = query("archive/insert_events")
	ArchiveInsertSale       = query("archive/insert_sale")
	ArchiveInsertSaleEvents = query("archive/insert_sale_events")
	ArchiveMark             = query("archive/mark")
	ArchiveMarkDeleted      = query("archive/mark_deleted")
	ArchiveMarkRestored     = query("archive/mark_restored")
	ArchiveSale             = query("archive/sale")
	ArchiveSaleEvents       = query("archive/sale_events")
	ArchiveTable            = query("archive/table")
	AuditArchivedSales      = query("audit/archived_sales")
	AuditBuyers             = query("audit/buyers")
	AuditConservation       = query("audit/conservation")
	AuditCounters           = query("audit/counters")
	AuditDeadLetters        = query("audit/dead_letters")
	AuditDeadlines          = query("audit/deadlines")
	AuditDrop               = query("audit/drop")
	AuditEnded              = query("audit/ended")
	AuditFigures            = query("audit/figures")
	AuditFind               = query("audit/find")
	AuditLatest             = query("audit/latest")
	AuditNoteLatest         = query("audit/note_latest")
	AuditNoteStill          = query("audit/note_still")
	AuditOversold           = query("audit/oversold")
	AuditParked             = query("audit/parked")
	AuditProgress           = query("audit/progress")
	AuditReadFigures        = query("audit/read_figures")
	AuditRebuilds           = query("audit/rebuilds")
	AuditRecord             = query("audit/record")
	AuditRedis              = query("audit/redis")
	AuditReservations       = query("audit/reservations")
	AuditRetired            = query("audit/retired")
	AuditRevisions          = query("audit/revisions")
	AuditSelectedSales      = query("audit/selected_sales")
	AuditSequence           = query("audit/sequence")
	AuditShardFigures       = query("audit/shard_figures")
	AuditTables             = query("audit/tables")
	AuditTerms              = query("audit/terms")
	AuditTwoLiveOrders      = query("audit/two_live_orders")
	AuditUnfinishedBuyers   = query("audit/unfinished_buyers")

	CatalogChangeSale       = query("catalog/change_sale")
	CatalogClaimPartition   = query("catalog/claim_partition")
	CatalogFindCreatedSale  = query("catalog/find_created_sale")
	CatalogFindLowering     = query("catalog/find_lowering")
	CatalogFindSaleChange   = query("catalog/find_sale_change")
	CatalogFindSales        = query("catalog/find_sales")
	CatalogFollowedSales    = query("catalog/followed_sales")
	CatalogFreeSaleKey      = query("catalog/free_sale_key")
	CatalogInsertSale       = query("catalog/insert_sale")
	CatalogLockSale         = query("catalog/lock_sale")
	CatalogMarkPublished    = query("catalog/mark_published")
	CatalogPublishedSales   = query("catalog/published_sales")
	CatalogRefuseLowering   = query("catalog/refuse_lowering")
	CatalogRetireSale       = query("catalog/retire_sale")
	CatalogSaleChanges      = query("catalog/sale_changes")
	CatalogSaleHistory      = query("catalog/sale_history")
	CatalogUnpublishedSales = query("catalog/unpublished_sales")

	CrowdSaleOrders = query("crowd/sale_orders")
	CrowdSaleSold   = query("crowd/sale_sold")

	DeadLetterFind          = query("deadletter/find")
	DeadLetterList          = query("deadletter/list")
	DeadLetterLock          = query("deadletter/lock")
	DeadLetterMarkDiscarded = query("deadletter/mark_discarded")
	DeadLetterMarkReplayed  = query("deadletter/mark_replayed")
	DeadLetterPark          = query("deadletter/park")

	DoctorServerSettings = query("doctor/server_settings")
	DoctorUnitsOnSale    = query("doctor/units_on_sale")

	FleetDesk     = query("fleet/desk")
	FleetFunnel   = query("fleet/funnel")
	FleetTimeline = query("fleet/timeline")

	LedgerAddSold          = query("ledger/add_sold")
	LedgerArchivedSale     = query("ledger/archived_sale")
	LedgerChangeOrders     = query("ledger/change_orders")
	LedgerDueReleases      = query("ledger/due_releases")
	LedgerExportChanges    = query("ledger/export_changes")
	LedgerExportOrders     = query("ledger/export_orders")
	LedgerFindHistory      = query("ledger/find_history")
	LedgerFindOrders       = query("ledger/find_orders")
	LedgerHeartbeat        = query("ledger/heartbeat")
	LedgerListOfPrefix     = query("ledger/list_of_prefix")
	LedgerListOfSale       = query("ledger/list_of_sale")
	LedgerListOfUser       = query("ledger/list_of_user")
	LedgerListOfUserInSale = query("ledger/list_of_user_in_sale")
	LedgerLockOrder        = query("ledger/lock_order")
	LedgerLockOverdue      = query("ledger/lock_overdue")
	LedgerLogRefusals      = query("ledger/log_refusals")
	LedgerMakeMonths       = query("ledger/make_months")
	LedgerNextSale         = query("ledger/next_sale")
	LedgerNoteReleases     = query("ledger/note_releases")
	LedgerNoteTraces       = query("ledger/note_traces")
	LedgerOverdueSale      = query("ledger/overdue_sale")
	LedgerPastOrders       = query("ledger/past_orders")
	LedgerPendingReleases  = query("ledger/pending_releases")
	LedgerReceiptSecret    = query("ledger/receipt_secret")
	LedgerRecordFresh      = query("ledger/record_fresh")
	LedgerRecordOrders     = query("ledger/record_orders")
	LedgerReleaseSale      = query("ledger/release_sale")
	LedgerReturnSold       = query("ledger/return_sold")
	LedgerSaleEpoch        = query("ledger/sale_epoch")
	LedgerSalesOfOrders    = query("ledger/sales_of_orders")
	LedgerTakeReleases     = query("ledger/take_releases")

	PGEndSession     = query("pg/end_session")
	PGFindBlockers   = query("pg/find_blockers")
	PGLockHolder     = query("pg/lock_holder")
	pgPrepareSession = query("pg/prepare_session")
	PGTryLock        = query("pg/try_lock")

	ProjectionCompare     = query("projection/compare")
	ProjectionCounted     = query("projection/counted")
	ProjectionDifferences = query("projection/differences")
	ProjectionMiscounted  = query("projection/miscounted")
	ProjectionMonths      = query("projection/months")
	ProjectionOrders      = query("projection/orders")
	ProjectionRecount     = query("projection/recount")
	ProjectionReplace     = query("projection/replace")
	ProjectionReplay      = query("projection/replay")
	ProjectionTable       = query("projection/table")
	ProjectionWithdraw    = query("projection/withdraw")
	ProjectionWrongSales  = query("projection/wrong_sales")

	RebuildEndProgress  = query("rebuild/end_progress")
	RebuildEndedOrders  = query("rebuild/ended_orders")
	RebuildHolders      = query("rebuild/holders")
	RebuildNewestOrders = query("rebuild/newest_orders")
	RebuildNoteProgress = query("rebuild/note_progress")
	RebuildRaiseEpoch   = query("rebuild/raise_epoch")
	RebuildSalesInRedis = query("rebuild/sales_in_redis")
	RebuildSaveServer   = query("rebuild/save_server")
	RebuildTimeline     = query("rebuild/timeline")
	RebuildWait         = query("rebuild/wait")

	ReconcileAddCheck   = query("reconcile/add_check")
	ReconcileAddFinding = query("reconcile/add_finding")
	ReconcileCompare    = query("reconcile/compare")
	ReconcileCounts     = query("reconcile/counts")
	ReconcileExplain    = query("reconcile/explain")
	ReconcileForget     = query("reconcile/forget")
	ReconcileKeys       = query("reconcile/keys")
	ReconcileLockOrders = query("reconcile/lock_orders")
	ReconcileNote       = query("reconcile/note")
	ReconcilePage       = query("reconcile/page")
	ReconcileRelease    = query("reconcile/release")
	ReconcileTables     = query("reconcile/tables")

	RelayAddTarget       = query("relay/add_target")
	RelayClaim           = query("relay/claim")
	RelayListTargets     = query("relay/list_targets")
	RelayMove            = query("relay/move")
	RelayNewest          = query("relay/newest")
	RelayNoteFailure     = query("relay/note_failure")
	RelayPositionOfOrder = query("relay/position_of_order")
	RelayPositionOfSale  = query("relay/position_of_sale")
	RelayPositionOfTime  = query("relay/position_of_time")
	RelayReadOrders      = query("relay/read_orders")
	RelayReadSales       = query("relay/read_sales")
	RelayRemoveTarget    = query("relay/remove_target")
	RelayRenewTarget     = query("relay/renew_target")
	RelaySetPosition     = query("relay/set_position")
	RelaySetState        = query("relay/set_state")
	RelayWriters         = query("relay/writers")

	ReservationVerifiedServers = query("reservation/verified_servers")

	RetireCandidates  = query("retire/candidates")
	RetireLiveOrders  = query("retire/live_orders")
	RetireMatchOrders = query("retire/match_orders")
	RetireOpenSale    = query("retire/open_sale")
	schemaContracts   = query("schema/contracts")
	schemaGuards      = query("schema/guards")
	schemaHasSales    = query("schema/has_sales")
	schemaLiftLimits  = query("schema/lift_limits")
	schemaUnreleased  = query("schema/unreleased")
	schemaVersions    = query("schema/versions")

	SurveyLook   = query("survey/look")
	SurveyServer = query("survey/server")

	WorkerMakeMonths     = query("worker/make_months")
	WorkerMostPartitions = query("worker/most_partitions")
)
