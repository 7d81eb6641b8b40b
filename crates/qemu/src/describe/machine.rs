//! The machine's own options.

use std::fmt::Write as _;

use super::live::LiveState;
use crate::cmdline::QemuOption;

/// Names the machine by its versioned type: `q35` means another machine in every version of QEMU.
/// Options that newer versions have removed are written in the newer spelling.
pub(super) fn refresh(options: &mut Vec<QemuOption>, live: &LiveState) {
    let mut machine: Option<usize> = None;
    let mut extra = Vec::new();
    for option in options.iter_mut() {
        match option.name.as_str() {
            "no-acpi" => extra.push(("acpi", "off")),
            "no-hpet" => extra.push(("hpet", "off")),
            _ => {}
        }
    }
    options.retain(|option| option.name != "no-acpi" && option.name != "no-hpet");
    for (at, option) in options.iter_mut().enumerate() {
        if option.name == "machine" {
            let mut value = option.parse_value();
            value.remove("type");
            option.value = Some(value.to_string());
            machine = machine.or(Some(at));
        }
    }
    let rest = machine.and_then(|at| options.get(at)).and_then(|option| option.value.clone());
    let mut text = live.machine_type.clone();
    if let Some(rest) = rest.filter(|rest| !rest.is_empty()) {
        text.push(',');
        text.push_str(&rest);
    }
    for (key, value) in extra {
        let _ = write!(text, ",{key}={value}");
    }
    let whole = QemuOption::new("machine", text);
    match machine.and_then(|at| options.get_mut(at)) {
        Some(option) => *option = whole,
        None => options.insert(0, whole),
    }
    options.retain(|option| option.name != "machine" || option.value.as_deref() != Some(""));
}

/// Returns the accelerator.
pub(super) fn accelerator(options: &[QemuOption], kvm: bool) -> String {
    if kvm {
        return "kvm".to_owned();
    }
    let asked = options.iter().find_map(|option| match option.name.as_str() {
        "accel" => option.value.as_deref()?.split(',').next().map(str::to_owned),
        "machine" => option.parse_value().get("accel"),
        _ => None,
    });
    asked.filter(|accelerator| accelerator != "kvm" && !accelerator.contains(':')).unwrap_or("tcg".to_owned())
}
