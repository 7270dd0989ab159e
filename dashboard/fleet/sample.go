package fleet

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"github.com/google/uuid"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"stampede/internal/format"
)

// The metrics that are read. All others are skipped before they are parsed, which makes a round several times cheaper.
const (
	metricBuild           = "stampede_build_info"
	metricStart           = "process_start_time_seconds"
	metricCPU             = "process_cpu_seconds_total"
	metricMemory          = "process_resident_memory_bytes"
	metricPurchases       = "stampede_purchases_total"
	metricPurchaseSeconds = "stampede_purchase_duration_seconds"
	metricSalePurchases   = "stampede_sale_purchases_total"
	metricInFlight        = "stampede_http_requests_in_flight"
	metricInFlightLimit   = "stampede_http_requests_in_flight_limit"
	metricConnections     = "stampede_connections"
	metricOperatorsFile   = "stampede_operators_file_current"
	metricReceiptSecret   = "stampede_receipt_secret_info"
	metricKeys            = "stampede_key_set_keys"
	metricKeySetCurrent   = "stampede_key_set_current"
	metricOrders          = "stampede_orders_total"
	metricRebuilds        = "stampede_rebuilds_total"
	metricDurableSeconds  = "stampede_accept_to_durable_seconds"
	metricWaiting         = "stampede_stream_waiting_orders"
	metricOldest          = "stampede_stream_oldest_entry_age_seconds"
	metricReachable       = "stampede_stream_reachable"
	metricReaders         = "stampede_stream_readers"
	metricFailing         = "stampede_worker_failing"
	metricPartitions      = "stampede_worker_partitions"
	metricRelayDelivered  = "stampede_relay_deliveries_total"
	metricRelayLag        = "stampede_relay_lag_seconds"
	metricRelayFailing    = "stampede_relay_failing"
	metricRelayState      = "stampede_relay_target_state"
	metricRelayServing    = "stampede_relay_serving"
	metricRelayHeld       = "stampede_relay_held_seconds"
	metricReady           = "stampede_ready"
	metricGuardAge        = "stampede_guard_age_seconds"
	metricLost            = "stampede_entries_lost_total"
	metricSetAside        = "stampede_orders_set_aside"
	metricReleases        = "stampede_releases_pending"
	metricRefunds         = "stampede_refunds_due"
	metricRefundAge       = "stampede_refunds_due_age_seconds"
	metricPayments        = "stampede_payments_waiting"
	metricPaymentAge      = "stampede_payments_waiting_age_seconds"
	metricUnclear         = "stampede_payments_unclear"
	metricUnclearAge      = "stampede_payments_unclear_age_seconds"
	metricDisputed        = "stampede_payments_disputed"
	metricPostgresUp      = "stampede_postgres_up"
	metricRedisUp         = "stampede_redis_up"
	metricClockAhead      = "stampede_clock_ahead_seconds"
)

// wanted has the names of all of them, and of the series of histograms.
var wanted = func() map[string]bool {
	names := map[string]bool{}
	for _, name := range []string{
		metricBuild, metricStart, metricCPU, metricMemory, metricPurchases, metricSalePurchases, metricInFlight,
		metricInFlightLimit, metricConnections, metricOperatorsFile, metricOrders, metricWaiting, metricOldest,
		metricReachable, metricReaders, metricFailing, metricPartitions, metricRelayDelivered, metricRelayLag,
		metricRelayFailing,
		metricRelayState, metricRelayServing, metricRelayHeld, metricRebuilds, metricReceiptSecret,
		metricReady, metricGuardAge, metricLost, metricSetAside, metricReleases, metricPostgresUp, metricRedisUp,
		metricRefunds, metricRefundAge, metricPayments, metricPaymentAge, metricUnclear, metricUnclearAge, metricDisputed,
		metricKeys, metricKeySetCurrent, metricClockAhead, metricReports, metricMoney,
	} {
		names[name] = true
	}
	for _, histogram := range []string{metricPurchaseSeconds, metricDurableSeconds} {
		for _, suffix := range []string{"", "_bucket", "_sum", "_count"} {
			names[histogram+suffix] = true
		}
	}
	return names
}()

const (
	// seriesMax bounds the series that are kept of one metric of one process.
	seriesMax = 512
	// labelMax bounds a label value that is shown.
	labelMax = 100
)

// errNotStampede is the error of a target that answers with something else.
var errNotStampede = errors.New("it answers, but not with the metrics of Stampede")

// Places in outcomes.
const (
	accepted = iota
	refused
	shed
	failed
	outcomesCount
)

// outcomes counts purchases by what came of them.
type outcomes [outcomesCount]float64

// sample is what one scrape of a process says.
type sample struct {
	version string
	start   float64 // of the process, in seconds since 1970; 0 if unknown

	ingress, worker, relay bool

	cpu, memory, connections, inFlight, inFlightLimit float64
	clockAhead                                        float64 // of that of Postgres, in seconds

	purchases     outcomes
	overloaded    float64 // a part of purchases[shed]
	sales         map[uuid.UUID]outcomes
	receiptSecret string // its fingerprint; "" if unknown
	notReady      string // why it takes no purchases; "" if it does
	// salesCounted is true if it counts purchases by sale.
	salesCounted bool
	answers      histogram
	money        money // reports of an ingress, and payments of ingresses and workers

	recorded, rejected, voided float64            // orders
	lost                       float64            // entries
	rebuilds                   map[string]float64 // of stock by reason, but those that operators asked for
	guardAge                   float64            // in seconds
	setAside, releases         float64            // orders that cannot end, and ended ones whose units are not released
	refunds, refundAge         float64            // payments whose refund is due, and the seconds since when the oldest is
	payments, paymentAge       float64            // payments that wait, and how many seconds the oldest does
	unclear, unclearAge        float64            // the same of unclear payments
	disputed                   float64            // payments
	postgresGone, redisGone    bool               // for this process
	durable                    histogram
	streams                    map[string]streamSample
	failing                    []string
	idle                       string // why it reads nothing; "" if it does

	delivered     float64
	relayTargets  map[string]relaySample
	operatorsFile bool // it has a fault

	keySetOld bool    // the latest fetch of the key set has failed
	keys      float64 // of the key set, that can be used
}

// streamSample is what a worker says of a stream.
type streamSample struct {
	waiting, oldest float64
	known, reads    bool
}

// relaySample is what a relay says of a target.
type relaySample struct {
	lag, failing, held float64
	disabled, paused   bool
}

// read reads a page of metrics.
func read(page []byte) (s *sample, err error) {
	defer func() {
		if r := recover(); r != nil { // expfmt reads what any process may have written
			s, err = nil, fmt.Errorf("its metrics cannot be parsed: %v", r)
		}
	}()
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(bytes.NewReader(filterMetrics(page)))
	if err != nil {
		return nil, fmt.Errorf("its metrics cannot be parsed: %s", printable(err.Error()))
	}
	if families[metricBuild] == nil && families[metricPurchases] == nil && families[metricFailing] == nil {
		return nil, errNotStampede
	}
	return readSample(families), nil
}

// filterMetrics returns the lines with metrics that are read, and with their types.
func filterMetrics(page []byte) []byte {
	kept := make([]byte, 0, len(page)/4)
	for line := range bytes.Lines(page) {
		name := line
		if typed, is := bytes.CutPrefix(line, []byte("# TYPE ")); is {
			name = typed
		}
		if end := bytes.IndexAny(name, "{ \t\r\n"); end >= 0 {
			name = name[:end]
		}
		if wanted[string(name)] {
			kept = append(kept, line...)
		}
	}
	if len(kept) > 0 && kept[len(kept)-1] != '\n' {
		kept = append(kept, '\n')
	}
	return kept
}

func readSample(families map[string]*dto.MetricFamily) *sample {
	s := &sample{
		rebuilds: map[string]float64{}, sales: map[uuid.UUID]outcomes{},
		streams: map[string]streamSample{}, relayTargets: map[string]relaySample{},
	}
	each(families[metricBuild], func(l labels, _ float64) { s.version = l.value("version") })
	s.start, s.cpu, s.memory = sum(families[metricStart]), sum(families[metricCPU]), sum(families[metricMemory])
	eachSigned(families[metricClockAhead], func(_ labels, v float64) { s.clockAhead = v })
	s.money = readMoney(families[metricReports], families[metricMoney])
	s.readIngress(families)
	s.readWorker(families)
	s.readRelay(families)
	each(families[metricGuardAge], func(_ labels, v float64) { s.guardAge = max(s.guardAge, v) })
	// A relay without targets has no metrics of its own.
	s.relay = len(s.relayTargets) > 0 || families[metricRelayServing] != nil || !s.ingress && !s.worker
	return s
}

func (s *sample) readIngress(families map[string]*dto.MetricFamily) {
	s.ingress = families[metricPurchases] != nil
	s.connections, s.inFlight = sum(families[metricConnections]), sum(families[metricInFlight])
	s.inFlightLimit = sum(families[metricInFlightLimit])
	each(families[metricPurchases], func(l labels, v float64) {
		switch l.value("verdict") {
		case "reserved", "replayed":
			s.purchases[accepted] += v
		case "overloaded":
			s.purchases[shed] += v
			s.overloaded += v
		case "rate-limited":
			s.purchases[shed] += v
		case "unavailable", "unknown":
			s.purchases[failed] += v
		default:
			s.purchases[refused] += v
		}
	})
	each(families[metricReceiptSecret], func(l labels, _ float64) { s.receiptSecret = l.value("fingerprint") })
	each(families[metricReady], func(l labels, v float64) {
		if v == 0 && l.value("process") == "ingress" {
			s.notReady = cmp.Or(l.value("reason"), "it is not ready")
		}
	})
	s.salesCounted = families[metricSalePurchases] != nil
	each(families[metricSalePurchases], func(l labels, v float64) {
		id, err := uuid.Parse(l.value("sale"))
		place := slices.Index([]string{"accepted", "refused", "shed", "failed"}, l.value("outcome"))
		if err != nil || place < 0 {
			return // all other sales together, or of a newer version
		}
		one := s.sales[id]
		one[place] += v
		s.sales[id] = one
	})
	s.answers = addHistograms(families[metricPurchaseSeconds])
	each(families[metricOperatorsFile], func(_ labels, v float64) { s.operatorsFile = v == 0 })
	each(families[metricKeys], func(l labels, v float64) {
		if l.value("state") == "usable" {
			s.keys = v
		}
	})
	each(families[metricKeySetCurrent], func(_ labels, v float64) { s.keySetOld = v == 0 })
}

func (s *sample) readWorker(families map[string]*dto.MetricFamily) {
	s.worker = families[metricFailing] != nil
	each(families[metricOrders], func(l labels, v float64) {
		switch l.value("outcome") {
		case "confirmed":
			s.recorded += v
		case "rejected":
			s.recorded, s.rejected = s.recorded+v, s.rejected+v
		case "voided":
			s.recorded, s.voided = s.recorded+v, s.voided+v
		}
	})
	each(families[metricRebuilds], func(l labels, v float64) {
		if reason := l.value("reason"); reason != "by-hand" && reason != "reconciled" {
			s.rebuilds[reason] += v
		}
	})
	s.lost = sum(families[metricLost])
	s.setAside, s.releases = sum(families[metricSetAside]), sum(families[metricReleases])
	s.refunds, s.refundAge = sum(families[metricRefunds]), sum(families[metricRefundAge])
	s.payments, s.paymentAge = sum(families[metricPayments]), sum(families[metricPaymentAge])
	s.unclear, s.unclearAge = sum(families[metricUnclear]), sum(families[metricUnclearAge])
	s.disputed = sum(families[metricDisputed])
	each(families[metricPostgresUp], func(_ labels, v float64) { s.postgresGone = v == 0 })
	each(families[metricRedisUp], func(_ labels, v float64) { s.redisGone = s.redisGone || v == 0 })
	s.durable = addHistograms(families[metricDurableSeconds])
	stream := func(name string, set func(one *streamSample, v float64)) {
		each(families[name], func(l labels, v float64) {
			one := s.streams[l.value("stream")]
			set(&one, v)
			s.streams[l.value("stream")] = one
		})
	}
	stream(metricWaiting, func(one *streamSample, v float64) { one.waiting, one.known = v, true })
	stream(metricOldest, func(one *streamSample, v float64) { one.oldest = v })
	stream(metricReachable, func(one *streamSample, v float64) { one.known = one.known && v != 0 })
	stream(metricReaders, func(one *streamSample, v float64) { one.reads = v != 0 })
	each(families[metricPartitions], func(l labels, v float64) {
		if v == 0 {
			s.idle = l.value("idle")
		}
	})
	each(families[metricFailing], func(l labels, v float64) {
		if v > 0 {
			s.failing = append(s.failing, l.value("step"))
		}
	})
	slices.Sort(s.failing)
}

func (s *sample) readRelay(families map[string]*dto.MetricFamily) {
	each(families[metricRelayDelivered], func(_ labels, v float64) { s.delivered += v })
	target := func(name string, set func(one *relaySample, l labels, v float64)) {
		each(families[name], func(l labels, v float64) {
			one := s.relayTargets[l.value("target")]
			set(&one, l, v)
			s.relayTargets[l.value("target")] = one
		})
	}
	target(metricRelayLag, func(one *relaySample, _ labels, v float64) { one.lag = v })
	target(metricRelayFailing, func(one *relaySample, _ labels, v float64) { one.failing = v })
	target(metricRelayHeld, func(one *relaySample, _ labels, v float64) { one.held = v })
	target(metricRelayState, func(one *relaySample, l labels, v float64) {
		one.disabled = one.disabled || l.value("state") == "disabled" && v == 1
		one.paused = one.paused || l.value("state") == "paused" && v == 1
	})
}

// kind names the parts of Stampede that run in the process.
func (s *sample) kind() string {
	var parts []string
	for _, part := range []struct {
		name string
		runs bool
	}{{"ingress", s.ingress}, {"worker", s.worker}, {"relay", s.relay}} {
		if part.runs {
			parts = append(parts, part.name)
		}
	}
	return strings.Join(parts, ", ")
}

// readers are the streams that the process reads.
func (s *sample) readers() []string {
	var streams []string
	for _, name := range slices.Sorted(maps.Keys(s.streams)) {
		if s.streams[name].reads {
			streams = append(streams, name)
		}
	}
	return streams
}

type labels []*dto.LabelPair

// value returns the value of a label, bounded and printable.
func (l labels) value(name string) string {
	for _, pair := range l {
		if pair.GetName() == name {
			return printable(pair.GetValue())
		}
	}
	return ""
}

// each calls do for the series of a counter, a gauge or an untyped metric, with a finite value that is not negative.
func each(family *dto.MetricFamily, do func(l labels, value float64)) {
	eachSigned(family, func(l labels, v float64) { do(l, max(v, 0)) })
}

// eachSigned is each with values that may be negative.
func eachSigned(family *dto.MetricFamily, do func(l labels, value float64)) {
	for i, m := range family.GetMetric() {
		if i == seriesMax {
			return
		}
		var v float64
		switch {
		case m.Counter != nil:
			v = m.Counter.GetValue()
		case m.Gauge != nil:
			v = m.Gauge.GetValue()
		default:
			v = m.Untyped.GetValue()
		}
		do(m.Label, finite(v)-finite(-v))
	}
}

func sum(family *dto.MetricFamily) (total float64) {
	each(family, func(_ labels, v float64) { total += v })
	return total
}

// finite makes a number of another process safe to show and to add: what is infinite, negative or not a number
// counts as nothing.
func finite(v float64) float64 {
	const most = 1e15 // is exact in a float64, with room to add
	if math.IsNaN(v) || v < 0 || math.IsInf(v, 0) {
		return 0
	}
	return min(v, most)
}

// printable returns a text from another process in a form that is safe to show.
func printable(text string) string { return shortened(text, labelMax) }

// shortened is printable, with at most so many runes.
func shortened(text string, runesMax int) string {
	text = strings.ToValidUTF8(text, "\uFFFD")
	if runes := []rune(text); len(runes) > runesMax {
		text = string(runes[:runesMax]) + "…"
	}
	return strings.Map(func(r rune) rune {
		if format.Misleads(r) {
			return ' '
		}
		return r
	}, text)
}
