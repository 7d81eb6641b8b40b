//! The fleet of a controller: status, hosts, VMs, events, cordons.

use std::path::Path;

use api::fleet::{FleetClient, FleetEvent, FleetHost, FleetInfo, FleetVm};
use api::report::{bytes, rate};
use api::{Client, Cordon, HostId};

use super::cli::CordonOptions;
use crate::Code;
use crate::failure::Failure;
use crate::output::{Output, Text, table};

/// Events that are shown by default.
const LAST_EVENTS: u64 = 100;

/// `whimbrel fleet status`.
pub(super) fn status(client: &FleetClient, output: &Output) -> Result<Code, Failure> {
    output.show(&client.info()?, |info: &FleetInfo| {
        let mut text = Text::default();
        let FleetInfo { controller, version, pid, term, listen, .. } = info;
        text.line(format_args!("controller {controller} (whimbrel {version}, pid {pid}, term {term})"));
        text.line(format_args!("  listens at   {listen}"));
        text.line(format_args!(
            "  hosts        {}, {} connected, {} cordoned",
            info.hosts, info.connected, info.cordoned
        ));
        text.line(format_args!("  VMs          {}", info.vms));
        text.line(format_args!("  migrations   {} under way, {} in doubt", info.migrations, info.in_doubt));
        let running =
            if info.evacuations.is_empty() { "none".to_owned() } else { info.evacuations.join(", ") };
        text.line(format_args!("  evacuations  {running}"));
        text.finish()
    });
    Ok(Code::Done)
}

/// `whimbrel fleet hosts`.
pub(super) fn hosts(client: &FleetClient, output: &Output) -> Result<Code, Failure> {
    output.show(&client.hosts()?, |hosts: &Vec<FleetHost>| {
        if hosts.is_empty() {
            return "no hosts; agents with the table `[controller]` connect by themselves\n".to_owned();
        }
        let heading = ["HOST", "STATE", "VMS", "CPUS", "BUSY", "MEMORY", "AVAILABLE", "QEMU", "REMAINS"];
        table(heading, hosts.iter().map(host_row))
    });
    Ok(Code::Done)
}

fn host_row(host: &FleetHost) -> [String; 9] {
    let mut states = vec![if host.connected { "connected" } else { "away" }];
    if host.role != "host" && !host.role.is_empty() {
        states.push(&host.role);
    }
    if host.cordoned {
        states.push("cordoned");
    }
    let remains = match &host.remains {
        None => "?".to_owned(),
        Some(remains) if remains.is_empty() => "empty".to_owned(),
        Some(remains) => remains.len().to_string(),
    };
    [
        host.host.to_string(),
        states.join(", "),
        host.vms.len().to_string(),
        host.processors.to_string(),
        processors(host.load.busy_milli),
        bytes(host.memory_bytes),
        bytes(host.load.available_bytes),
        host.qemu_versions.join(", "),
        remains,
    ]
}

/// `whimbrel fleet vms`.
pub(super) fn vms(client: &FleetClient, output: &Output) -> Result<Code, Failure> {
    output.show(&client.vms()?, |vms: &Vec<FleetVm>| {
        if vms.is_empty() {
            return "no VMs; agents report those that they have adopted\n".to_owned();
        }
        let heading = ["VM", "HOST", "STATE", "VCPUS", "BUSY", "MEMORY", "QEMU", "MIGRATION"];
        table(heading, vms.iter().map(vm_row))
    });
    Ok(Code::Done)
}

fn vm_row(vm: &FleetVm) -> [String; 8] {
    let state = if vm.connected { vm.state.clone() } else { format!("{}, host away", vm.state) };
    let migration = vm.migration.as_ref().map_or_else(
        || "-".to_owned(),
        |moved| {
            let (left, speed) = (bytes(moved.remaining_bytes), rate(moved.rate_bytes_per_s));
            format!("{} to {}, {left} left, {speed}", moved.migration, moved.to)
        },
    );
    [
        vm.vm.to_string(),
        vm.host.to_string(),
        state,
        vm.vcpus.to_string(),
        processors(vm.busy_milli),
        bytes(vm.memory_bytes),
        vm.qemu_version.clone(),
        migration,
    ]
}

/// Formats thousandths of a processor.
fn processors(milli: u64) -> String {
    format!("{}.{}", milli / 1000, milli / 100 % 10)
}

/// `whimbrel fleet inventory`: always JSON.
pub(super) fn inventory(client: &FleetClient, output: &Output) -> Result<Code, Failure> {
    output.show(&client.inventory()?, |inventory| {
        serde_json::to_string_pretty(inventory).map_or_else(|error| format!("{error}\n"), |text| text + "\n")
    });
    Ok(Code::Done)
}

/// `whimbrel fleet events`.
pub(super) fn events(
    client: &FleetClient,
    after: Option<u64>,
    follow: bool,
    output: &Output,
) -> Result<Code, Failure> {
    let after = if let Some(after) = after {
        after
    } else {
        let last = client.last_event()?;
        if follow { last } else { last.saturating_sub(LAST_EVENTS) }
    };
    for event in client.events(after, follow)? {
        output
            .show(&event?, |event: &FleetEvent| format!("{} {} {}\n", event.number, event.time, event.text));
    }
    Ok(Code::Done)
}

/// `whimbrel fleet cordon` and `uncordon`.
pub(super) fn cordon(
    options: CordonOptions,
    cordoned: bool,
    agent: &Path,
    controller: &Path,
    output: &Output,
) -> Result<Code, Failure> {
    let what = if cordoned { "accepts no more VMs" } else { "accepts VMs" };
    if let Some(host) = options.host {
        let changed = FleetClient::new(controller)?.set_cordoned(&host, cordoned)?;
        output.show(&changed, |changed: &FleetHost| {
            let later = if changed.connected { "" } else { ", once its agent connects" };
            format!("host {} {what}{later}\n", changed.host)
        });
    } else {
        let changed = Client::new(agent)?.set_cordoned(cordoned)?;
        output.show(&changed, |changed: &Cordon| format!("host {} {what}\n", changed.host));
    }
    Ok(Code::Done)
}

/// `whimbrel fleet forget`.
pub(super) fn forget(client: &FleetClient, host: &HostId, output: &Output) -> Result<Code, Failure> {
    output.show(&client.forget_host(host)?, |gone: &FleetHost| format!("host {} is forgotten\n", gone.host));
    Ok(Code::Done)
}
