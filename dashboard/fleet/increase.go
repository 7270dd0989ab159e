package fleet

import (
	"time"

	"github.com/google/uuid"
)

// increase is what the counters of a process have gained between two samples, or those of all processes together.
type increase struct {
	seconds float64 // between the samples; 0 if there is only one

	cpu                        float64
	purchases                  outcomes
	overloaded                 float64
	sales                      map[uuid.UUID]outcomes
	recorded, rejected, voided float64
	lost, delivered            float64
	answers, durable           histogram
	money                      money
}

// perSecond returns a part of the increase per second.
func (i *increase) perSecond(gained float64) float64 {
	if i.seconds == 0 {
		return 0
	}
	return gained / i.seconds
}

// since returns what the process has gained since its sample before.
func (s *sample) since(before *sample, elapsed time.Duration) increase {
	i := increase{
		seconds:    elapsed.Seconds(),
		cpu:        gained(before.cpu, s.cpu),
		overloaded: gained(before.overloaded, s.overloaded),
		purchases:  s.purchases.since(before.purchases),
		recorded:   gained(before.recorded, s.recorded),
		rejected:   gained(before.rejected, s.rejected),
		voided:     gained(before.voided, s.voided),
		lost:       gained(before.lost, s.lost),
		delivered:  gained(before.delivered, s.delivered),
		answers:    s.answers.since(before.answers),
		durable:    s.durable.since(before.durable),
		money:      s.money.since(before.money),
	}
	for id, now := range s.sales {
		// All its series exist from its first purchase on, so the first value of a sale is an increase.
		if more := now.since(before.sales[id]); more.total() > 0 {
			if i.sales == nil {
				i.sales = make(map[uuid.UUID]outcomes)
			}
			i.sales[id] = more
		}
	}
	return i
}

// gained returns the increase of a counter. One that is lower than before was reset.
func gained(before, now float64) float64 {
	if now < before {
		return now
	}
	return now - before
}

func (o outcomes) since(before outcomes) outcomes {
	for i := range o {
		o[i] = gained(before[i], o[i])
	}
	return o
}

func (o outcomes) total() (sum float64) {
	for _, n := range o {
		sum += n
	}
	return sum
}

// add adds what a process has gained, per second.
func (i *increase) add(p *increase) {
	i.seconds = 1
	i.cpu += p.perSecond(p.cpu)
	i.overloaded += p.perSecond(p.overloaded)
	i.recorded += p.perSecond(p.recorded)
	i.delivered += p.perSecond(p.delivered)
	for key, n := range p.money {
		if i.money == nil {
			i.money = money{}
		}
		i.money[key] += p.perSecond(n)
	}
	for at := range p.purchases {
		i.purchases[at] += p.perSecond(p.purchases[at])
	}
	for id, more := range p.sales {
		if i.sales == nil {
			i.sales = make(map[uuid.UUID]outcomes)
		}
		sum := i.sales[id]
		for at := range more {
			sum[at] += p.perSecond(more[at])
		}
		i.sales[id] = sum
	}
}

func (o outcomes) rates() Rates {
	return Rates{Offered: o.total(), Accepted: o[accepted], Refused: o[refused], Shed: o[shed], Failed: o[failed]}
}
