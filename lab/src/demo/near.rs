//! First act: two hosts in one network, and a client that uses a web application.

use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::Value;

use super::{VM, document, ended, runs_qemu};
use crate::agents::Agents;
use crate::client::{Client, ClientReport, wait_for_service};
use crate::debian_guest::debian_guest;
use crate::environment::Environment;
use crate::error::Result;
use crate::follow::DEADLINE;
use crate::guest::Guest;
use crate::lab::{Lab, LabConfig, vm_address};
use crate::run::run;
use crate::spec::Net;

/// Time between an answer and the client's next request.
const PAUSE: Duration = Duration::from_millis(2);
/// Answers that the client waits for before the migration, and again after it.
const ANSWERS: usize = 500;

/// Results of the first act.
#[derive(Debug, Clone, Serialize)]
pub struct NearReport {
    /// From the start of QEMU until the guest served, ms.
    pub boot_ms: u128,
    /// Report of the migration's source; see the manual of `whimbrel migrate --json`.
    pub migration: Value,
    /// Report of the client.
    pub client: ClientReport,
    /// True if the VM's QEMU runs on the destination, and only there.
    pub moved: bool,
}

impl NearReport {
    pub(super) fn is_clean(&self) -> bool {
        self.moved && self.client.is_clean() && self.migration["outcome"] == "moved"
    }
}

/// Plays the act.
pub(super) fn play(
    whimbrel: &Path,
    environment: &Environment,
    say: &mut impl FnMut(&str),
) -> Result<NearReport> {
    say("Two hosts, a witness, a router and a client, as network namespaces.");
    let lab = Lab::up(&LabConfig::new("demo"))?;
    let net = Net::new(1);
    // The destination's end of the VM's network has to be there before the VM is.
    lab.b.tap(&net.tap)?;

    say("An agent on each host and on the witness, with certificates of their own.");
    let agents = Agents::new(&lab, environment, whimbrel).with_registry();
    agents.write()?;
    let _daemons = agents.start_all()?;

    say("On host a, a Debian guest with nginx and SQLite boots, under a stock QEMU.");
    let start = Instant::now();
    let guest = Guest::start(&lab.a, environment, &debian_guest(&lab, environment, VM, 1)?)?;
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
    say(&report_text);
    describe(&client, say);
    drop(guest);
    Ok(NearReport { boot_ms, migration, client, moved })
}

/// Describes the client's report in a few lines.
fn describe(client: &ClientReport, say: &mut impl FnMut(&str)) {
    for (name, watched) in [("page", &client.page), ("notes", &client.notes)] {
        say(&format!(
            "Client, {name}: {} answers, usually after {:.1} ms, the longest gap {:.1} ms; {}.",
            watched.answered,
            watched.median_ms,
            watched.longest_gap_ms,
            ended(watched.error.as_deref()),
        ));
    }
    let kept = client.notes_kept.map_or("an unknown number".to_owned(), |notes| notes.to_string());
    say(&format!("Notes confirmed: {}; notes there: {kept}.", client.notes.answered));
}
