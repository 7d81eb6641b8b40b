//! Measurement of a VM for forecasts: how it writes, and what its memory holds.
//!
//! The guest can see no change. Writes are noticed by the same means as in a migration, for some seconds
//! ([`TrackingPlan`]); each page costs the guest at most one page fault. The tracking ends with the measurement, however
//! that ends, and the kernel ends it if this process dies.
//!
//! A VM is never measured while it is moved: the start of a migration ends the measurement, and waits for that
//! ([`Measurements::interrupt`]).

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use ::memory::{ContentSample, RamRegion, open_source, sample_content};
use engine::forecast::tracking::{TrackingPlan, WriteCount};
use proto::VmName;
use qemu::ram::{RamBlock, RamKind};
use tracee::{InjectError, TrackError, WriteMeter, write_fault_cost};

use crate::source_vm::{SourceVm, VmError};
use crate::{Context, ram};
use api::VmMeasurement;
use api::report::unix_ms_now;
use store::journal::VmRecord;

/// Number of pages whose content is sampled: the share of pages with content is known to a hundredth then.
const SAMPLED_PAGES: u64 = 2048;

/// Cost of a page fault where it cannot be measured.
const USUAL_FAULT: Duration = Duration::from_micros(1);

/// Reason for which a VM could not be measured.
#[derive(Debug, thiserror::Error)]
pub enum MeasureError {
    /// QEMU could not be queried.
    #[error(transparent)]
    Vm(#[from] VmError),
    /// QEMU could not open a userfaultfd for the agent.
    #[error("QEMU could not be made to open a userfaultfd")]
    Inject(#[from] InjectError),
    /// The kernel does not track writes to the memory.
    #[error(transparent)]
    Track(#[from] TrackError),
    /// The guest's memory cannot be read.
    #[error("cannot read the guest's memory")]
    Ram(#[from] ::memory::RamError),
    /// A migration of the VM has begun.
    #[error("a migration of the VM began, and ended the measurement")]
    Interrupted,
}

/// Measurements that are under way, by VM; true for those that are to end.
#[derive(Debug, Default)]
pub struct Measurements {
    running: Mutex<BTreeMap<VmName, bool>>,
    changed: Condvar,
}

/// Measurement that is under way, until this is dropped.
#[derive(Debug)]
pub struct RunningMeasurement<'a> {
    all: &'a Measurements,
    vm: VmName,
}

impl Measurements {
    /// Begins a measurement; none if one of this VM is under way. The caller makes sure that no migration of it is.
    pub fn begin(&self, vm: &VmName) -> Option<RunningMeasurement<'_>> {
        let mut running = self.lock();
        if running.contains_key(vm) {
            return None;
        }
        running.insert(vm.clone(), false);
        Some(RunningMeasurement { all: self, vm: vm.clone() })
    }

    /// Ends the measurement of a VM, if one is under way, and returns when nothing of it remains.
    pub fn interrupt(&self, vm: &VmName) {
        let mut running = self.lock();
        if let Some(is_interrupted) = running.get_mut(vm) {
            *is_interrupted = true;
            self.changed.notify_all();
        }
        let ended = self.changed.wait_while(running, |running| running.contains_key(vm));
        drop(ended.unwrap_or_else(PoisonError::into_inner));
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<VmName, bool>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl RunningMeasurement<'_> {
    /// Returns true once the measurement is to end.
    pub fn is_interrupted(&self) -> bool {
        self.all.lock().get(&self.vm).copied().unwrap_or(true)
    }

    /// Waits until a time.
    fn wait_until(&self, until: Instant) -> Result<(), MeasureError> {
        let goes_on = |running: &mut BTreeMap<VmName, bool>| running.get(&self.vm) == Some(&false);
        let left = until.saturating_duration_since(Instant::now());
        let waited = self.all.changed.wait_timeout_while(self.all.lock(), left, goes_on);
        let (running, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        drop(running);
        if timeout.timed_out() { Ok(()) } else { Err(MeasureError::Interrupted) }
    }

    fn check(&self) -> Result<(), MeasureError> {
        if self.is_interrupted() { Err(MeasureError::Interrupted) } else { Ok(()) }
    }
}

impl Drop for RunningMeasurement<'_> {
    fn drop(&mut self) {
        self.all.lock().remove(&self.vm);
        self.all.changed.notify_all();
    }
}

/// Measures a VM. QEMU's monitor is used at the beginning and at the end only.
pub fn measure(
    context: &Context,
    record: &VmRecord,
    running: &RunningMeasurement<'_>,
) -> Result<VmMeasurement, MeasureError> {
    let mut vm = SourceVm::attach(context, record)?;
    let is_running = vm.check_run_state()?;
    let threads = vm.processor_threads().unwrap_or_default();
    let written_before = vm.written_to_disks().ok();
    vm.release_monitor();
    let mut measured = VmMeasurement {
        unix_ms: unix_ms_now(),
        pid: vm.process.pid(),
        start_time_ticks: vm.process.start_time(),
        memory_bytes: vm.blocks.iter().map(|block| block.used_bytes).sum(),
        used_bytes: 0,
        compressed_permille: 0,
        writes: <_>::default(),
        tracked_us: 0,
        faults: 0,
        fault_ns: 0,
        vcpu_use_us_per_s: Vec::new(),
        disk_bytes_per_s: None,
    };
    sample(&vm, running, &mut measured)?;
    running.check()?;
    if !is_running {
        measured.disk_bytes_per_s = Some(0);
        return Ok(measured);
    }
    let began = Instant::now();
    let used_before = processor_times(&vm, &threads);
    track(context, &vm, running, &mut measured)?;
    let took = began.elapsed();
    let used = used_before.iter().zip(processor_times(&vm, &threads));
    measured.vcpu_use_us_per_s =
        used.map(|(before, now)| per_second(now.saturating_sub(*before), took)).collect();
    running.check()?;
    measured.disk_bytes_per_s = written_before.and_then(|before| {
        let written = vm.written_to_disks().ok()?.saturating_sub(before);
        u64::try_from(u128::from(written) * 1_000_000_000 / took.as_nanos().max(1)).ok()
    });
    Ok(measured)
}

/// Samples the content of the memory.
fn sample(
    vm: &SourceVm,
    running: &RunningMeasurement<'_>,
    measured: &mut VmMeasurement,
) -> Result<(), MeasureError> {
    // Nothing shows which huge pages of a process are missing, and reading one would allocate it.
    let can_read = |block: &&RamBlock| {
        block.page_size_bytes == tracee::PAGE_SIZE || matches!(block.kind, RamKind::SharedFile(_))
    };
    let blocks: Vec<_> = vm.blocks.iter().filter(can_read).cloned().collect();
    let readable_bytes: u64 = blocks.iter().map(|block| block.used_bytes).sum();
    let readers = open_source(&vm.process, &ram::regions(&blocks))?;
    let sample: ContentSample =
        sample_content(&readers, SAMPLED_PAGES, measured.unix_ms, || !running.is_interrupted())?;
    let content = u128::from(readable_bytes) * u128::from(sample.content_permille()) / 1000;
    let content_bytes = u64::try_from(content).unwrap_or(u64::MAX).min(readable_bytes);
    measured.used_bytes = content_bytes + (measured.memory_bytes - readable_bytes);
    measured.compressed_permille = u32::try_from(sample.compressed_permille()).unwrap_or(1000);
    Ok(())
}

/// Tracks the guest's writes.
fn track(
    context: &Context,
    vm: &SourceVm,
    running: &RunningMeasurement<'_>,
    measured: &mut VmMeasurement,
) -> Result<(), MeasureError> {
    measured.fault_ns = fault_ns();
    let mut plan = TrackingPlan::new(measured.fault_ns);
    let ranges: Vec<_> = ram::regions(&vm.blocks).iter().map(RamRegion::range).collect();
    let userfaultfd = context.injector.create_userfaultfd(&vm.process)?;
    let starting = Instant::now();
    let meter = WriteMeter::start_unless(&vm.process, userfaultfd, &ranges, || running.is_interrupted())?;
    let mut meter = meter.ok_or(MeasureError::Interrupted)?;
    // Pages are protected, and counted, one after the other: in the mean in the middle of that time.
    let began = starting + starting.elapsed() / 2;
    while let Some(next_ns) = plan.next_count_ns() {
        running.wait_until(began + Duration::from_nanos(next_ns))?;
        let counting = Instant::now();
        let written = meter.count()?;
        let elapsed = counting.saturating_duration_since(began) + counting.elapsed() / 2;
        let elapsed_ns = elapsed.as_nanos() as u64;
        plan.counted(WriteCount { elapsed_ns, written_bytes: written.bytes, faults: written.faults });
    }
    meter.stop()?;
    measured.writes = plan.curve();
    if let Some(last) = plan.last() {
        (measured.tracked_us, measured.faults) = (last.elapsed_ns / 1000, last.faults);
    }
    Ok(())
}

/// Returns the cost of a page fault on this host, which is measured once.
fn fault_ns() -> u64 {
    static COST: OnceLock<u64> = OnceLock::new();
    *COST.get_or_init(|| write_fault_cost().unwrap_or(USUAL_FAULT).as_nanos() as u64)
}

/// Returns the processor time of each thread; zero for one that has ended.
fn processor_times(vm: &SourceVm, threads: &[u32]) -> Vec<Duration> {
    threads.iter().map(|thread| vm.process.thread_cpu_time(*thread).unwrap_or_default()).collect()
}

/// Returns a use of processor time in microseconds per second.
fn per_second(used: Duration, took: Duration) -> u64 {
    u64::try_from(used.as_micros() * 1_000_000 / took.as_micros().max(1)).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use super::*;
    use crate::testing;

    #[test]
    fn one_vm_has_one_measurement_at_a_time() {
        let measurements = Measurements::default();
        let other = VmName::new("db").unwrap();
        let first = measurements.begin(&testing::vm()).unwrap();
        assert!(measurements.begin(&testing::vm()).is_none());
        let _second = measurements.begin(&other).unwrap();
        drop(first);
        assert!(measurements.begin(&testing::vm()).is_some());
        // Nothing is waited for.
        measurements.interrupt(&testing::vm());
    }

    #[test]
    fn a_migration_ends_a_measurement_and_waits_for_that() {
        let measurements = Measurements::default();
        let running = measurements.begin(&testing::vm()).unwrap();
        running.wait_until(Instant::now()).unwrap();
        let (ended, has_ended) = mpsc::channel();
        let all = &measurements;
        thread::scope(|scope| {
            scope.spawn(move || {
                all.interrupt(&testing::vm());
                has_ended.try_recv().unwrap();
            });
            let far = Instant::now() + testing::PATIENCE;
            let waited = running.wait_until(far).unwrap_err();
            assert!(matches!(waited, MeasureError::Interrupted) && running.is_interrupted());
            ended.send(()).unwrap();
            drop(running);
        });
        assert!(measurements.begin(&testing::vm()).is_some());
    }

    #[test]
    fn processor_time_is_per_second() {
        let used = per_second(Duration::from_millis(500), Duration::from_secs(2));
        assert_eq!(used, 250_000);
        assert_eq!(per_second(Duration::ZERO, Duration::ZERO), 0);
    }
}
