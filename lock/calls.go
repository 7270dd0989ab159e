package lock

import (
	"strconv"
)

// call identifies one script call and its repeats. Serials grow with each call of a Locker, and two
// calls that are in progress never share a receipt.
type call struct {
	receipt receipt
	serial  uint64
}

// receipt is the name of a key in which Redis keeps the last call and its answer, without a hash
// tag for clusters.
type receipt string

// receipts are reused, the last used first.
type receipts struct {
	unused []receipt
	made   int
}

// newCall requires mu.
func (l *Locker) newCall() call {
	return call{receipt: l.takeReceipt(), serial: l.nextSerial()}
}

// takeReceipt requires mu.
func (l *Locker) takeReceipt() receipt {
	r := &l.receipts
	if n := len(r.unused); n > 0 {
		last := r.unused[n-1]
		r.unused = r.unused[:n-1]
		return last
	}
	r.made++
	return receipt(l.prefix + ":receipt:" + l.id + ":" + strconv.Itoa(r.made))
}

// nextSerial requires mu.
func (l *Locker) nextSerial() uint64 {
	l.serial++
	return l.serial
}

// ownerName returns an owner name that is unique among all processes.
func (l *Locker) ownerName(serial uint64) string {
	return l.id + ":" + decimal(serial)
}

func decimal(n uint64) string { return strconv.FormatUint(n, 10) }

// releaseCall returns the call that releases locks of a grant. Callers hold mu.
func (l *Locker) releaseCall(g *grant) call {
	if g.receiptMoved {
		return l.newCall()
	}
	g.receiptMoved = true
	return call{receipt: g.acquireCall.receipt, serial: l.nextSerial()}
}

// freeReceipt lets other calls use the receipt. Callers hold mu.
func (l *Locker) freeReceipt(c call) { l.receipts.unused = append(l.receipts.unused, c.receipt) }
