//! The demonstration: a Debian guest that serves a page and keeps notes migrates from one host to another while a
//! client watches.

use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::Value;

use crate::agents::Agents;
use crate::client::{Client, ClientReport, wait_for_service};
use crate::disk::overlay;
use crate::environment::{Environment, QemuVersion};
use crate::error::{Context, Result};
use crate::follow::DEADLINE;
use crate::guest::Guest;
use crate::host::Host;
use crate::lab::{Lab, LabConfig, VM_GATEWAY, vm_address};
use crate::run::run;
use crate::spec::{Boot, Device, Disk, GuestSpec, Load, Net};

/// The name of the VM that migrates.
const VM: &str = "notes";
/// Time between an answer and the client's next request.
const PAUSE: Duration = Duration::from_millis(2);
/// Answers that the client waits for before the migration, and again after it.
const ANSWERS: usize = 500;

/// Results of the demonstration.
#[derive(Debug, Clone, Serialize)]
pub struct DemoReport {
    /// From the start of QEMU until the guest served, ms.
    pub boot_ms: u128,
    /// Report of the migration's source; see the manual of `whimbrel migrate --json`.
    pub migration: Value,
    /// Report of the client.
    pub client: ClientReport,
    /// True if the VM's QEMU runs on the destination, and only there.
    pub moved: bool,
}

/// Returns the Debian guest as the `n`th VM: its own disk, over the prepared one, is in the shared directory.
pub fn debian_guest(lab: &Lab, environment: &Environment, name: &str, n: u8) -> Result<GuestSpec> {
    let disk = lab.shared_directory()?.join(format!("{name}.qcow2"));
    overlay(&environment.qemu(QemuVersion::Installed)?, &disk, &environment.debian_disk()?, "qcow2")?;
    server(environment, name, n, &disk, "")
}

/// Returns a Debian guest with this root disk, number `n` in the laboratory's network; `more` is added to the kernel's
/// command line.
pub(crate) fn server(
    environment: &Environment,
    name: &str,
    n: u8,
    disk: &Path,
    more: &str,
) -> Result<GuestSpec> {
    let address = vm_address(n);
    Ok(GuestSpec {
        memory_mib: 512,
        boot: Boot::Kernel {
            kernel: environment.kernel()?,
            initrd: environment.debian_initrd()?,
            append: format!(
                "console=ttyS0 quiet panic=-1 guest.ip={address}/24 guest.gateway={VM_GATEWAY} {more}"
            ),
        },
        devices: vec![
            Device::Disk(Disk::new("disk0", disk, "qcow2")),
            Device::Net(Net::new(n)),
            Device::Balloon,
            Device::Rng,
        ],
        ..GuestSpec::tiny(name, Load::default())
    })
}

/// Runs the demonstration with the program `whimbrel`; `say` receives lines about its progress. Reports are written
/// into `directory`.
pub fn run_demo(whimbrel: &Path, directory: &Path, mut say: impl FnMut(&str)) -> Result<DemoReport> {
    let environment = Environment::discover();
    say("Two hosts, a witness, a router and a client, as network namespaces.");
    let lab = Lab::up(&LabConfig::new("demo"))?;
    let net = Net::new(1);
    // The destination's end of the VM's network has to be there before the VM is.
    lab.b.tap(&net.tap)?;

    say("An agent on each host and on the witness, with certificates of their own.");
    let agents = Agents::new(&lab, &environment, whimbrel).with_registry();
    agents.write()?;
    let _daemons = agents.start_all()?;

    say("On host a, a Debian guest with nginx and SQLite boots, under a stock QEMU.");
    let start = Instant::now();
    let guest = Guest::start(&lab.a, &environment, &debian_guest(&lab, &environment, VM, 1)?)?;
    guest.serial().follow()?.wait_for_text("SERVING")?;
    wait_for_service(&lab.client, vm_address(1), 80, DEADLINE)?;
    let boot_ms = start.elapsed().as_millis();
    say(&format!("It serves after {:.1} s.", start.elapsed().as_secs_f64()));

    say("Behind the router, a client opens two connections, and will not open them again.");
    let client = Client::start(&lab.client, (vm_address(1), 80).into(), PAUSE)?;
    client.wait_for_answers(ANSWERS)?;

    run(&mut agents.command(&lab.a, &["vm", "adopt", VM]))?;
    say("The VM moves to host b.");
    let mut migrate = agents.command(&lab.a, &["migrate", VM, "--to", lab.b.name(), "--json"]);
    let migration = document(&run(migrate.stderr(Stdio::inherit()))?);
    client.wait_for_answers(ANSWERS)?;
    let client = client.finish();

    let report_text = run(&mut agents.command(&lab.a, &["report", VM]))?;
    let moved = !runs_qemu(&lab.a)? && runs_qemu(&lab.b)?;
    let report = DemoReport { boot_ms, migration, client, moved };
    fs::create_dir_all(directory).context(|| format!("cannot make {}", directory.display()))?;
    let path = directory.join("demo.json");
    let text = serde_json::to_string_pretty(&report).map_err(std::io::Error::from);
    fs::write(&path, text.context(|| "cannot write the report")?)
        .context(|| format!("cannot write {}", path.display()))?;
    say(&report_text);
    describe(&report.client, &mut say);
    say(&format!("All of it: {}", path.display()));
    drop(guest);
    Ok(report)
}

impl DemoReport {
    /// Returns true if everything succeeded.
    pub fn is_clean(&self) -> bool {
        self.moved && self.client.is_clean() && self.migration["outcome"] == "moved"
    }
}

/// Parses the one JSON document that the program prints; other output is kept as text.
fn document(output: &str) -> Value {
    serde_json::from_str(output).unwrap_or_else(|_| Value::String(output.to_owned()))
}

fn runs_qemu(host: &Host) -> Result<bool> {
    let program = |pid: &u32| fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
    Ok(host.processes()?.iter().map(program).any(|path| path.display().to_string().contains("qemu-system")))
}

/// Describes the client's report in a few lines.
fn describe(client: &ClientReport, say: &mut impl FnMut(&str)) {
    for (name, watched) in [("page", &client.page), ("notes", &client.notes)] {
        say(&format!(
            "Client, {name}: {} answers, usually after {:.1} ms, the longest gap {:.1} ms; {}.",
            watched.answered,
            watched.median_ms,
            watched.longest_gap_ms,
            watched.error.as_deref().unwrap_or("its connection never broke"),
        ));
    }
    let kept = client.notes_kept.map_or("an unknown number".to_owned(), |notes| notes.to_string());
    say(&format!("Notes confirmed: {}; notes there: {kept}.", client.notes.answered));
}
