# `format` rewrites, `format-check` and `tidy` only look. The versions are Debian 12's: others format differently.
find_program(K3_CLANG_FORMAT NAMES clang-format-14)
find_program(K3_RUN_CLANG_TIDY NAMES run-clang-tidy-14)
set(list_sources git -C ${CMAKE_SOURCE_DIR} ls-files -z *.cpp *.h *.cu *.cuh)
if(K3_CLANG_FORMAT)
  add_custom_target(format COMMAND ${list_sources} | xargs -0 ${K3_CLANG_FORMAT} -i
                    WORKING_DIRECTORY ${CMAKE_SOURCE_DIR} VERBATIM)
  add_custom_target(format-check COMMAND ${list_sources} | xargs -0 ${K3_CLANG_FORMAT} --dry-run -Werror
                    WORKING_DIRECTORY ${CMAKE_SOURCE_DIR} VERBATIM)
endif()
if(K3_RUN_CLANG_TIDY)
  add_custom_target(tidy COMMAND ${K3_RUN_CLANG_TIDY} -quiet -p ${CMAKE_BINARY_DIR}
                                 "^${CMAKE_SOURCE_DIR}/(apps|rank|comm|kernels|loader)/.*[.]cpp$"
                    WORKING_DIRECTORY ${CMAKE_SOURCE_DIR} VERBATIM)
endif()
